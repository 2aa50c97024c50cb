"""saved: one decision for each result that autograd keeps between forward and backward.

Keep it, make it again (whenever it is needed, or once), put it on disk, into host memory or into fewer bits, or drop what nobody reads.

saved/ is the mechanism at the heart. table.py: one decision for the result of an operator (recompute, once or whenever needed, disk,
host, bits, drop), named by module call, operator and ordinal, so that a plan survives small differences between a simulated and a real
step. What autograd does not follow (masks, positions) is counted apart: libraries make it in one step and not in the next. forward.py:
while a loss is computed, saved-tensor hooks give autograd a handle instead of a tensor; a dispatch mode, entered only around the module
calls of the table, writes down how a result can be made again (ops/remaking.py: nodes, versions checked, in-place writes followed).
Nothing depends on the plan being right: what does not match is kept. What is put away waits in a file, or for a CUDA device in its
host's memory (elsewhere.py). Kernels of our own work part by part (ops/kernel_parts.py): a simulation runs one part, which stands for
all. line.py, schedule.py, rewriting.py follow the same mechanism on a trace: which operators run again before which, and how long each
piece lives; a capture of the applied table agrees with it to the byte in most cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.ledger.findings.words import is_under
from memfit.levers.lever import trace_of
from memfit.levers.reading import Check, are_each, at_least, is_word, one_of, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.saved.apply import apply_tables
from memfit.levers.saved.elsewhere import has_place
from memfit.levers.saved.line import Line, line_of
from memfit.levers.saved.rewriting import with_remakings
from memfit.levers.saved.schedule import schedule
from memfit.levers.saved.table import BITS, CACHE, DROP, RECOMPUTE, STORED, TIMES, make_tables, ops_of, settings_of, tables_of
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option, Trace
from memfit.step import Step

_CHEAP = frozenset(
    f"aten.{name}"
    for name in (
        "silu.default", "relu.default", "gelu.default", "sigmoid.default", "tanh.default", "leaky_relu.default", "elu.default",
        "native_group_norm.default", "native_layer_norm.default", "native_batch_norm.default", "mul.Tensor", "add.Tensor", "sub.Tensor",
        "div.Tensor", "cat.default", "_to_copy.default", "constant_pad_nd.default", "upsample_nearest2d.vec", "upsample_nearest3d.vec",
        "upsample_nearest2d.default", "upsample_nearest3d.default", "clone.default", "pow.Tensor_Scalar",
    )
)  # fmt: skip
_SMALLEST = 1 << 12
_DECISIONS = (RECOMPUTE, *TIMES, *STORED, DROP)


def read_settings(settings: Mapping[str, Any]) -> None:
    """Of an edited file, where `tables_of` would take any word for a decision."""
    region = reader({"module": _or_none(is_word), "call": _or_none(at_least(0)), "ops": are_each(_is_row)})
    for rows in settings.values():
        for row in rows:
            region(row)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_row(told: Any) -> bool:
    op, ordinal, do = told
    return is_word(op) and at_least(0)(ordinal) and one_of(*_DECISIONS)(do)


class SavedLever:
    """What autograd keeps, decided tensor by tensor."""

    name = "saved"
    exactness = "bitwise"
    needs = "nothing"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """A few tables people know; the planner makes its own between and beyond them."""
        line = line_of(trace_of(ledger))
        tables = {
            "inputs nobody reads dropped": unread_inputs(line),
            "masks kept as bits": masks(line),
            "cheap results made again": {op: RECOMPUTE for op in _large(line) if line.trace.ops[op].name in _CHEAP},
            "every block made again": dict.fromkeys(next(iter(block_insides(line)), ()), CACHE),
        }
        return [table_option(line.trace, ops, name) for name, ops in tables.items() if ops]

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The time line with remakings in it."""
        line = line_of(trace_of(ledger))
        ops = {op: do for op, do in ops_of(line.trace, tables_of(option.settings)).items() if has_place(line.trace.device, do)}
        return rewritten(ledger, with_remakings(line, schedule(line, ops)))

    def apply(self, step: Step, option: Option) -> Undo:
        """Hooks around the losses; no model is changed."""
        return apply_tables(step, tables_of(option.settings))


def table_option(trace: Trace, ops: Mapping[int, str], name: str, why: str = "") -> Option:
    """A table as an option."""
    return Option("saved", name, "bitwise", settings_of(make_tables(trace, ops)), why)


def unread_inputs(line: Line) -> dict[int, str]:
    """Convolutions of frozen modules: they save an input that only their weight's gradient would need."""
    frozen = tuple(path for model in line.trace.models for path in model.frozen)
    found = {row.op for row in line.trace.saved if line.trace.ops[row.op].name == "aten.convolution.default"}
    return {op: DROP for op in sorted(found) if any(is_under(line.trace.ops[op].module, path) for path in frozen)}


def masks(line: Line) -> dict[int, str]:
    """Results of which each value is one of two: truth values, and what a dropout multiplies with."""
    return {op: BITS for op in _large(line) if line.kept.get(line.made[op][0]) and _has_two_values(line, line.made[op][0])}


def _has_two_values(line: Line, s: int) -> bool:
    return line.trace.storages[s].dtype == "bool" or any("bernoulli_" in line.trace.ops[writer].name for writer in line.writers[s])


def _large(line: Line) -> list[int]:
    return [op for op, made in sorted(line.made.items()) if max(line.trace.storages[s].bytes for s in made) >= _SMALLEST]


def block_insides(line: Line) -> list[set[int]]:
    """The results inside the calls of numbered modules (blocks.0, blocks.1, …) but what they hand on; coarse blocks first, then finer."""
    found = []
    blocks = list({c for c in line.trace.calls if c.module.rpartition(".")[2].isdigit() and c.last > c.first})
    while blocks:
        outer = [c for c in blocks if not any(o != c and o.first <= c.first and c.last <= o.last for o in blocks)] or blocks
        found.append({op for op in _large(line) if any(c.first <= op < c.last for c in outer)})
        blocks = [c for c in blocks if c not in outer]
    return found
