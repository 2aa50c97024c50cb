"""What is decided for each saved tensor, as it stands in a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.ledger.findings.words import is_under
from memfit.records import Op, Trace

RECOMPUTE = "recompute"  # whenever it is needed
CACHE = "recompute once"
TIMES = {CACHE: 1, "recompute twice": 2, "recompute thrice": 3}  # after so many remakings it stays until nobody needs it any more
DISK, HOST, BITS = STORED = ("disk", "host", "bits")  # put away in another place or form, and brought back whenever it is needed
_WITHOUT = " without gradient"
DROP = "drop"  # for a convolution: its input, which nobody will read


@dataclass(frozen=True)
class Region:
    """A module call inside which operators are watched: the `ordinal`-th call of that module in a phase."""

    module: str
    ordinal: int


Span = tuple[Region | None, int, int]  # with its first and last op; None: the whole phase


@dataclass(frozen=True)
class Decision:
    """What is done with an operator's result instead of keeping it: the `ordinal`-th of its kind in a region, or in the phase."""

    op: str
    ordinal: int
    region: Region | None
    do: str


@dataclass(frozen=True)
class PhaseTable:
    """The decisions for one phase."""

    regions: tuple[Region | None, ...] = ()  # the module calls to watch; None: the whole phase
    decisions: tuple[Decision, ...] = ()


def settings_of(tables: Mapping[str, PhaseTable]) -> dict[str, Any]:
    """As plain JSON: each region with its rows [operator, ordinal, what is done]."""
    return {
        phase: [
            {"module": r and r.module, "call": r and r.ordinal, "ops": [[d.op, d.ordinal, d.do] for d in t.decisions if d.region == r]}
            for r in t.regions
        ]
        for phase, t in tables.items()
    }


def tables_of(settings: Mapping[str, Any]) -> dict[str, PhaseTable]:
    """Read back from a plan."""
    return {
        phase: PhaseTable(
            tuple(_region(row) for row in rows),
            tuple(Decision(op, ordinal, _region(row), do) for row in rows for op, ordinal, do in row["ops"]),
        )
        for phase, rows in settings.items()
    }


def _region(row: Mapping[str, Any]) -> Region | None:
    return None if row["module"] is None else Region(row["module"], row["call"])


def make_tables(trace: Trace, ops: Mapping[int, str]) -> dict[str, PhaseTable]:
    """Decisions by op number, sorted into phases and into the module calls that must be watched."""
    tables = {}
    for phase in dict.fromkeys(op.loss for op in trace.ops if op.phase == "forward"):
        mine = forward_ops(trace, phase)
        decided = [n for n in mine if n in ops]
        if decided:
            spans = regions_around(trace, mine, [*decided, *_later_writers(trace, decided)])
            decisions = tuple(_decision(trace, mine, spans, n, ops[n]) for n in decided)
            tables[phase] = PhaseTable(tuple(region for region, *_ in spans), decisions)
    return tables


def ops_of(trace: Trace, tables: Mapping[str, PhaseTable]) -> dict[int, str]:
    """The other way: decisions by op number on this trace; what it does not have is left out."""
    found: dict[int, str] = {}
    for phase, table in tables.items():
        mine = forward_ops(trace, phase)
        spans = {region: (first, last) for region, first, last in _calls(trace, mine)} | {None: (mine[0], mine[-1])} if mine else {}
        for d in table.decisions:
            first, last = spans.get(d.region, (0, -1))
            same = [n for n in mine if first <= n <= last and _kind(trace.ops[n]) == d.op]
            found.update({n: d.do for n in same[d.ordinal : d.ordinal + 1]})
    return found


def forward_ops(trace: Trace, phase: str) -> list[int]:
    """Those a table counts: a phase's forward, but for what runs inside memfit's own kernels."""
    return [n for n, op in enumerate(trace.ops) if op.loss == phase and op.phase == "forward" and not op.parts]


def _decision(trace: Trace, mine: list[int], spans: Sequence[Span], n: int, do: str) -> Decision:
    region, first, _ = next(span for span in spans if span[1] <= n <= span[2])
    kind = _kind(trace.ops[n])
    return Decision(kind, sum(_kind(trace.ops[other]) == kind for other in mine if first <= other < n), region, do)


def _kind(op: Op) -> str:
    return kind_of(op.name, op.followed)


def kind_of(name: str, followed: bool) -> str:
    """An operator's name in a table. What autograd does not follow is counted apart: a mask may have other operators from batch to batch.

    >>> kind_of("aten.add.Tensor", True), kind_of("aten.add.Tensor", False)
    ('aten.add.Tensor', 'aten.add.Tensor without gradient')
    """
    return name if followed else f"{name}{_WITHOUT}"


def name_of(kind: str) -> str:
    """Of the operator, whichever it is."""
    return kind.removesuffix(_WITHOUT)


def _later_writers(trace: Trace, decided: list[int]) -> list[int]:
    """In-place ops on what is made again, or on what it is made from: they must be seen as well."""
    since: dict[int, int] = {}
    for n in decided:
        for s in (*trace.ops[n].outputs, *trace.ops[n].inputs):
            since.setdefault(s, n)
    writers = [(n, op) for n, op in enumerate(trace.ops) if op.phase == "forward" and is_in_place(op.name)]
    return [n for n, op in writers if any(since.get(s, n) < n for s in op.outputs)]


def regions_around(trace: Trace, mine: list[int], decided: list[int]) -> list[Span]:
    """The smallest module calls that hold all decided ops, none inside another; the whole phase where one ran outside any."""
    whole, around = (None, mine[0], mine[-1]), smallest_calls(trace, mine)
    chosen = list(dict.fromkeys(around.get(n, whole) for n in decided))
    if whole in chosen:
        return [whole]
    return [a for a in chosen if not any(a[1:] != b[1:] and b[1] <= a[1] and a[2] <= b[2] for b in chosen)]


def smallest_calls(trace: Trace, mine: list[int]) -> dict[int, Span]:
    """For each op of a phase the innermost call around it; those outside of all calls are left out."""
    found: dict[int, Span] = {}
    for span in sorted(reversed(_calls(trace, mine)), key=lambda span: span[1] - span[2]):  # of two equal ones the outer counts
        found.update(dict.fromkeys(range(span[1], span[2] + 1), span))
    return found


def _calls(trace: Trace, mine: list[int]) -> list[Span]:
    """The calls of the step's own modules in a phase, numbered for each module."""
    strangers = [model.name for model in trace.models if model.outside]
    ordinals: dict[str, int] = {}
    spans: list[Span] = []
    for call in sorted((c for c in trace.calls if mine[0] <= c.first <= mine[-1]), key=lambda c: (c.first, -c.last)):
        if any(is_under(call.module, stranger) for stranger in strangers):
            continue
        ordinals[call.module] = ordinals.get(call.module, -1) + 1
        spans.append((Region(call.module, ordinals[call.module]), call.first, call.last))
    return spans


def is_in_place(name: str) -> bool:
    """Whether an operator writes to its first argument, as torch names them."""
    word = name.split(".")[1]
    return word.endswith("_") and not word.endswith("__")
