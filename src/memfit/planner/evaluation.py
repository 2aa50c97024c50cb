"""What a table of saved tensors gives: bytes alive all along the new line, and the seconds it adds. Exact, and quick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.levers.saved.line import Line
from memfit.levers.saved.schedule import Schedule, schedule
from memfit.levers.saved.table import BITS, DISK, HOST, STORED
from memfit.planner.watching import SECONDS_OF_A_DECISION, SECONDS_OF_A_LOOK, Watching
from memfit.records import Speeds


@dataclass(frozen=True)
class Outcome:
    """Of one table."""

    peak: int
    seconds: float  # added to the step
    alive: NDArray[np.int64]  # by moment: while each op of the old line runs, then during the remakings before each
    again: Mapping[int, int]  # ops that run again, and how often


class Evaluation:
    """One line, many tables."""

    def __init__(self, line: Line, seconds: NDArray[np.float64], speeds: Speeds) -> None:
        self.line, self.seconds = line, seconds
        self._speeds = {DISK: speeds.disk, HOST: speeds.host, BITS: speeds.bits}  # bytes a second, each way
        trace = line.trace
        count = len(trace.ops)
        self._born = np.array([max(s.born, 0) for s in trace.storages], dtype=np.int64)
        self._died = np.array([count - 1 if s.died is None else s.died for s in trace.storages], dtype=np.int64)
        self._bytes = np.array([s.bytes for s in trace.storages], dtype=np.int64)
        self._workspace = np.array([op.workspace for op in trace.ops], dtype=np.int64)
        self._watching = Watching(trace)
        self.before = self._before()

    @property
    def least_watching(self) -> float:
        """What a table adds at least, whatever it decides."""
        return self._watching.hooks + SECONDS_OF_A_LOOK

    def _before(self) -> NDArray[np.int64]:
        """What is alive just before each op of the plain line."""
        count = len(self._workspace)
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, self._born, self._bytes)
        born = change[:count].copy()
        np.add.at(change, self._died + 1, -self._bytes)
        before: NDArray[np.int64] = np.cumsum(change)[:count] - born
        return before

    def of(self, ops: Mapping[int, str]) -> Outcome:
        """Follow a table."""
        new = schedule(self.line, ops)
        moved = self._positions(new)
        alive = self._alive(new, moved)
        before = np.zeros(len(moved), dtype=np.int64)
        for op, nodes in new.again.items():
            before[op] = alive[moved[op] - len(nodes) : moved[op]].max(initial=0)
        again = Counter(node for nodes in new.again.values() for node in nodes)
        return Outcome(int(alive.max()), self._seconds(new, ops), np.concatenate([alive[moved], before]), again)

    def _positions(self, new: Schedule) -> NDArray[np.int64]:
        counts = np.zeros(len(self._workspace), dtype=np.int64)
        for op, nodes in new.again.items():
            counts[op] = len(nodes)
        return np.arange(len(counts)) + np.cumsum(counts)

    def _alive(self, new: Schedule, moved: NDArray[np.int64]) -> NDArray[np.int64]:
        where = moved.tolist()
        total = int(moved[-1]) + 1
        died = moved[self._died]
        for s, until in new.died.items():
            died[s] = new.position(until, where)
        change = np.zeros(total + 1, dtype=np.int64)
        np.add.at(change, moved[self._born], self._bytes)
        np.add.at(change, died + 1, -self._bytes)
        workspace = np.zeros(total, dtype=np.int64)
        workspace[moved] = self._workspace
        for op, nodes in new.again.items():
            start = int(moved[op]) - len(nodes)
            workspace[start : start + len(nodes)] = self._workspace[nodes]
        for piece in new.pieces:
            change[new.position(piece.born, where)] += piece.bytes
            change[new.position(piece.died, where) + 1] -= piece.bytes
        alive: NDArray[np.int64] = np.cumsum(change)[:total] + workspace
        return alive

    def _seconds(self, new: Schedule, ops: Mapping[int, str]) -> float:
        again = sum(self.cost(node, ops.get(node, "")) for nodes in new.again.values() for node in nodes)
        return again + sum(self.cost(op, do) for op, do in ops.items() if do in STORED) + self._watching.seconds(ops)

    def cost(self, op: int, do: str) -> float:
        """Seconds to make a result again, or to put it away or bring it back."""
        if do not in STORED:
            return float(self.seconds[op]) + SECONDS_OF_A_DECISION
        return sum(int(self._bytes[s]) for s in self.line.made.get(op, ())) / self._speeds[do] + SECONDS_OF_A_DECISION
