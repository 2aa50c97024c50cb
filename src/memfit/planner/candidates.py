"""Which results of the forward pass could be made again, and what that would free and need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from memfit.ledger.timeline import last_op
from memfit.levers.saved.line import Line

_SMALLEST_SHARE = 1 / 2000  # of the peak: smaller results are not worth a decision
_SMALLEST_BYTES = 1 << 12
_NEVER = ("aten.lift_fresh.default", "aten._local_scalar_dense.default")


@dataclass(frozen=True)
class Candidate:
    """The result of op `op`. Autograd reads it in `windows` of backward, [first op, last op] each; none: only others need it."""

    op: int
    bytes: int
    passes: int  # the last op that sees it if nothing is kept
    died: int
    windows: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]  # ops whose results it must have, those that are candidates themselves

    def is_away_at(self, moment: int) -> bool:
        """Whether it is in memory then only because autograd keeps it for later."""
        return bool(self.windows) and self.passes < moment <= self.died and not any(first <= moment <= last for first, last in self.windows)


def candidates_of(line: Line, peak: int) -> dict[int, Candidate]:
    """By op."""
    able = [op for op in sorted(line.made) if _can_be_made_again(line, op, max(_SMALLEST_BYTES, int(peak * _SMALLEST_SHARE)))]
    maker = {s: op for op in able for s in line.made[op]}
    return {op: candidate_of(line, op, maker) for op in able}


def _can_be_made_again(line: Line, op: int, smallest: int) -> bool:
    trace, storages = line.trace, line.made[op]
    if sum(trace.storages[s].bytes for s in storages) < smallest or trace.ops[op].name in _NEVER or op in line.once:
        return False
    writers = {writer for s in storages for writer in line.writers[s]}
    needs = {s for writer in writers for s in line.needs[writer]} - set(storages)
    return not any(line.writers.get(s, [-1])[-1] > min(writers) for s in needs)  # an input that is written to later is lost


def candidate_of(line: Line, op: int, maker: Mapping[int, int] = MappingProxyType({})) -> Candidate:
    """The result of an op; `maker` tells which ops made what it needs."""
    trace, storages = line.trace, line.made[op]
    needs = {s for s0 in storages for writer in line.writers[s0] for s in line.needs[writer]} - set(storages)
    return Candidate(
        op,
        sum(trace.storages[s].bytes for s in storages),
        max(line.passing[s] for s in storages),
        max(last_op(trace.storages[s], len(trace.ops)) for s in storages),
        windows_of(line, storages),
        tuple(sorted({maker[s] for s in needs if s in maker})),
    )


def windows_of(line: Line, storages: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """When autograd reads any of them, in order: [first op, last op] each."""
    rows = [row for s in storages for row in line.kept.get(s, ())]
    reads = ((line.trace.saved[row].read, line.ends[row]) for row in rows)
    return tuple(sorted((read, end) for read, end in reads if read is not None))


def unread_stretches(line: Line, storage: int) -> Iterator[tuple[int, int]]:
    """When a result lies in memory and nobody reads it: [first op, last op] each. A table can free it then, and at no other time."""
    start, last = line.passing[storage] + 1, last_op(line.trace.storages[storage], len(line.trace.ops))
    for read, end in (*windows_of(line, [storage]), (last + 1, last + 1)):
        if start <= min(read - 1, last):
            yield start, min(read - 1, last)
        start = max(start, end + 1)
