"""A trace as an allocator sees it: blocks asked for and given back, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.records import Trace

Event = tuple[int, int]  # a block and its bytes; 0 bytes give it back


@dataclass(frozen=True)
class Allocations:
    """What is there before the first step, what that step adds for good, and what every step asks for and gives back."""

    fixed: tuple[Event, ...]
    late: tuple[Event, ...]
    line: tuple[Event, ...]

    @classmethod
    def of(cls, trace: Trace) -> Allocations:
        """The allocations of a trace."""
        before = [(number, s) for number, s in enumerate(trace.storages) if s.born < 0 and s.bytes]
        return cls(
            tuple((number, s.bytes) for number, s in before if s.kind != "optimizer"),
            tuple((number, s.bytes) for number, s in before if s.kind == "optimizer"),
            tuple(_line(trace)),
        )

    def steps(self, count: int) -> Iterator[Event]:
        """All events of so many steps from the beginning of a program."""
        yield from self.fixed
        yield from self.line
        yield from self.late
        for _ in range(count - 1):
            yield from self.line

    @property
    def peak(self) -> int:
        """The most that is asked for at once in a steady step."""
        sizes: dict[int, int] = {}
        live = highest = sum(size for _, size in (*self.fixed, *self.late))
        for block, size in self.line:
            live += size or -sizes[block]
            sizes[block] = size
            highest = max(highest, live)
        return highest


def _line(trace: Trace) -> Iterator[Event]:
    born: dict[int, list[int]] = {}
    died: dict[int, list[int]] = {}
    end = len(trace.ops)
    for number, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.bytes:
            born.setdefault(storage.born, []).append(number)
            died.setdefault(end if storage.died is None else storage.died, []).append(number)
    for number, op in enumerate(trace.ops):
        yield from ((block, trace.storages[block].bytes) for block in born.get(number, ()))
        if op.workspace:
            yield -1 - number, op.workspace
            yield -1 - number, 0
        yield from ((block, 0) for block in died.get(number, ()))
    yield from ((block, 0) for block in died.get(end, ()))  # gradients go when the next step begins
