"""What a profile tells, chosen once for every way of showing it: rows, words and their order; no colours, no widths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memfit.records import Finding, Ledger, Stretch
from memfit.units import format_bytes, format_seconds

_MOST_OWNERS = 8
_MOST_FINDINGS = 6
_LEVELS = 64  # how finely a chart of eight rows of eighths can be drawn
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a module's path
_LEAST_COLUMNS = 6  # enough to name a short phase


@dataclass(frozen=True, slots=True)
class Figure:
    """A headline number and how it was come by."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A category's part of the peak."""

    category: str
    bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """Storages of one kind, made by one op in one place, or in layers that are alike ("h.*.attn")."""

    bytes: int
    count: int
    category: str
    op: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Span:
    """The columns of a chart that belong to one phase of one loss."""

    phase: str
    loss: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Chart:
    """Memory over the step: the most bytes alive in each column. Phases are not to scale."""

    columns: tuple[int, ...]
    top: int
    spans: tuple[Span, ...]

    @property
    def peak_column(self) -> int:
        """Where the peak is."""
        return self.columns.index(max(self.columns))


@dataclass(frozen=True, slots=True)
class ProfileView:
    """Everything a profile shows, in the order it is shown."""

    setting: str
    peak: Figure
    process: Figure
    process_parts: str
    peak_phase: str
    bars: tuple[Bar, ...]
    owners: tuple[OwnerRow, ...]
    other_owners: str
    findings: tuple[Finding, ...]
    other_findings: str
    notes: tuple[str, ...]


def profile_view(ledger: Ledger) -> ProfileView:
    """The rows and words of a profile."""
    groups = _grouped(ledger)
    findings = sorted(map(_placed, ledger.findings), key=lambda finding: -finding.bytes)
    return ProfileView(
        _setting(ledger),
        _peak(ledger),
        _process(ledger),
        _process_parts(ledger),
        next((_phase(s) for s in ledger.stretches if s.first <= ledger.peak_op <= s.last), ""),
        _bars(ledger),
        tuple(groups[:_MOST_OWNERS]),
        _left_out(groups[_MOST_OWNERS:], "smaller owner"),
        tuple(findings[:_MOST_FINDINGS]),
        _left_out(findings[_MOST_FINDINGS:], "smaller finding"),
        ledger.notes,
    )


def percent(share: float) -> str:
    """A part of the whole.

    >>> percent(0.682), percent(0.0001), percent(0)
    ('68.2 %', '<0.1 %', '0.0 %')
    """
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def _setting(ledger: Ledger) -> str:
    timing = "simulated" if ledger.step_seconds is None else f"{format_seconds(ledger.step_seconds)} a step"
    return f"{ledger.device} · batch of {ledger.batch_size} · {timing}"


def _peak(ledger: Ledger) -> Figure:
    events = "events" if ledger.process.measured_peak_bytes is None else "statistics"
    how = _predicted(ledger.low_bytes, ledger.high_bytes) if ledger.predicted else f"measured by torch's allocator {events}"
    return Figure("Peak", ledger.peak_bytes, how)


def _process(ledger: Ledger) -> Figure:
    measured = ledger.process.measured_bytes is not None
    who = "the system's high-water mark" if ledger.process.measured_peak_bytes is None else "torch's allocator statistics, with the context"
    how = f"measured by {who}" if measured else _predicted(ledger.process_low_bytes, ledger.process_high_bytes)
    return Figure("Process", ledger.process_bytes, how)


def _predicted(low: int, high: int) -> str:
    return f"predicted, interval [{format_bytes(low)}, {format_bytes(high)}]"


def _process_parts(ledger: Ledger) -> str:
    """The parts add up: what is neither base, peak nor workers is the allocator's slack."""
    process = ledger.process
    slack = ledger.process_bytes - process.base_bytes - ledger.peak_bytes - process.workers_bytes
    parts = [f"base {format_bytes(process.base_bytes)}", f"peak {format_bytes(ledger.peak_bytes)}"]
    if slack >= 0:
        parts.append(f"slack {format_bytes(slack)}")
    if process.workers:
        parts.append(f"{process.workers} worker{'s' * (process.workers > 1)} {format_bytes(process.workers_bytes)}")
    return " + ".join(parts) + (f" - {format_bytes(-slack)} never resident" if slack < 0 else "")


def _phase(stretch: Stretch) -> str:
    phase = "the optimizer's step" if stretch.phase == "optimizer" else stretch.phase
    return f"{phase} of {stretch.loss}" if stretch.loss else phase


def _bars(ledger: Ledger) -> tuple[Bar, ...]:
    whole = max(ledger.peak_bytes, 1)
    bars = [Bar(category, size, size / whole) for category, size in ledger.by_category.items() if size]
    return tuple(sorted(bars, key=lambda bar: -bar.bytes))


def _grouped(ledger: Ledger) -> list[OwnerRow]:
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for owner in ledger.at_peak:
        groups.setdefault((owner.category, op_word(owner.op), owner.module, owner.source), []).append(owner.bytes)
    rows = _alike(OwnerRow(sum(sizes), len(sizes), *group) for group, sizes in groups.items())
    return sorted(rows, key=lambda row: -row.bytes)


def _alike(rows: Iterable[OwnerRow]) -> Iterator[OwnerRow]:
    """Layers that differ only in their number and hold the same are told once, or a deep model would show one line eight times."""
    families: dict[OwnerRow, list[OwnerRow]] = {}
    for row in rows:
        families.setdefault(replace(row, module=_LAYER_NUMBER.sub("*", row.module)), []).append(row)
    for family, members in families.items():
        times = len(members)
        yield members[0] if times == 1 else replace(family, bytes=family.bytes * times, count=family.count * times)


def op_word(op: str) -> str:
    """An operator as people call it: without torch's own namespace and without the overload.

    >>> op_word("aten.convolution_backward.default (workspace)"), op_word("mylib.scan.default"), op_word("")
    ('convolution_backward (workspace)', 'mylib.scan', '')
    """
    name, blank, remark = op.partition(" ")
    parts = name.split(".")
    return ".".join(parts[:2][parts[0] == "aten" :]) + blank + remark


def _placed(finding: Finding) -> Finding:
    return finding if finding.where else replace(finding, where=finding.kind.replace("_", " "))


def _left_out(rows: Sequence[OwnerRow] | Sequence[Finding], noun: str) -> str:
    if not rows:
        return ""
    return f"and {len(rows)} {noun}{'s' * (len(rows) > 1)}, {format_bytes(sum(row.bytes for row in rows))} in all"


def chart_of(ledger: Ledger, columns: int) -> Chart | None:
    """The time line in so many columns; None when there is none. A phase gets room by how much happens in it."""
    if not ledger.timeline:
        return None
    top = max(max(ledger.timeline), ledger.peak_bytes, 1)
    stretches = ledger.stretches or (Stretch("", "", 0, len(ledger.timeline) - 1),)
    pieces = [ledger.timeline[s.first : s.last + 1] for s in stretches]
    levels: list[int] = []
    spans = []
    for stretch, piece, width in zip(stretches, pieces, _allotted([_moves(p, top) for p in pieces], columns), strict=True):
        if width:
            spans.append(Span(stretch.phase, stretch.loss, len(levels), len(levels) + width - 1))
        levels += _resampled(piece, width)
    return Chart(tuple(levels), top, tuple(spans))


def _moves(piece: Iterable[int], top: int) -> int:
    """How often the drawn level changes: an optimizer's thousand small ops should not push the forward pass aside."""
    levels = [_LEVELS * size // top for size in piece]
    return 1 + sum(a != b for a, b in pairwise(levels))


def _allotted(weights: Sequence[int], columns: int) -> list[int]:
    least = min(_LEAST_COLUMNS, columns // len(weights))
    spare = columns - least * len(weights)
    ends = [round(spare * sum(weights[:n]) / sum(weights)) for n in range(len(weights) + 1)]
    return [least + end - start for start, end in pairwise(ends)]


def _resampled(piece: Sequence[int], width: int) -> list[int]:
    """The most of each of `width` equal parts, so that no peak is lost; a short piece is stretched."""
    count = len(piece)
    return [max(piece[n * count // width : max((n + 1) * count // width, n * count // width + 1)]) for n in range(width)]
