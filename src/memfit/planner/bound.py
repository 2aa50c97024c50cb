"""What no table of saved tensors can undercut: the seconds that any of them adds to a step whose peak has to stay under a limit.

An integer programme that knows less than a step does: a result that is out of memory costs its own remakings, or its own way to the other
place and back, and nothing else, whatever must be made or held for it; packing is free; and of all moments it sees the worst. Each table
that fits fulfils it, so its best, or what the solver has proven of that, is never above what a table really takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memfit.levers.saved.table import RECOMPUTE
from memfit.planner.away import Away
from memfit.planner.candidates import Candidate, unread_stretches
from memfit.planner.evaluation import Evaluation, Outcome
from memfit.planner.silence import silence

_ROUNDS = 8
_MOMENTS = 12  # the worst of a round that the next one is told of
_APART = 3  # ops: a moment so near to a worse one says nothing new
_INFEASIBLE = 2  # as scipy calls it
_GAP = 0.01  # to the best, of what is called solved
_WHOLE_SECONDS = 0.3  # for choices that are whole: what they prove is better, and takes longer
_LEAST_SECONDS = 0.01
_ROUNDING = 1e-6  # what a solver takes for equal


class Searched(Protocol):
    """What it needs of a search."""

    evaluation: Evaluation
    plain: Outcome
    candidates: dict[int, Candidate]
    away: Away

    @property
    def barest(self) -> NDArray[np.int64]:
        """What is alive while each op runs, with everything packed that can be."""

    @property
    def floor(self) -> int:
        """No table has a lower peak."""


@dataclass(frozen=True)
class _Choice:
    """A result out of memory until it is read for the n-th time, which takes the choices for all earlier times."""

    seconds: float  # beside those of the choice before it
    frees: tuple[tuple[int, int, int], ...]  # bytes, from op, to op
    first: bool


def least_seconds(search: Searched, limit: int, seconds: float) -> float:
    """No table whose peak is at most `limit` adds less to a step; inf where there is none. `seconds` are for looking."""
    if search.plain.peak <= limit:
        return 0.0
    if search.floor > limit:
        return inf
    programme = _Programme([choice for c in search.candidates.values() for choice in _choices(search, c)], len(search.barest))
    return search.evaluation.least_watching + programme.least((search.barest - limit).astype(np.float64), time.thread_time() + seconds)


def _choices(search: Searched, candidate: Candidate) -> Iterator[_Choice]:
    line, cost = search.evaluation.line, search.evaluation.cost
    rows = [line.trace.saved[row] for s in line.made[candidate.op] for row in line.kept.get(s, ())]
    reads = [row.read for row in rows if row.read is not None and row.op >= candidate.op]
    put_away = cost(candidate.op, search.away.word) * (1 + len(reads)) if search.away.word else inf
    frees: dict[int, list[tuple[int, int, int]]] = {}
    for s in line.made[candidate.op]:
        for first, last in unread_stretches(line, s):
            frees.setdefault(1 + sum(read < first for read in reads), []).append((line.trace.storages[s].bytes, first, last))
    paid = 0.0
    for number, times in enumerate(sorted(frees)):
        price = min(times * cost(candidate.op, RECOMPUTE), put_away)
        yield _Choice(price - paid, tuple(frees[times]), number == 0)
        paid = price


class _Programme:
    """Choices by their place; it is told of more and more moments."""

    def __init__(self, choices: Sequence[_Choice], ops: int) -> None:
        self._count, self._ops = len(choices), ops
        self._seconds = np.array([choice.seconds for choice in choices])
        rows = [(place, *freed) for place, choice in enumerate(choices) for freed in choice.frees]
        self._place, self._bytes, self._from, self._to = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        self._later = np.array([place for place, choice in enumerate(choices) if not choice.first], dtype=np.int64)
        self._moments: list[int] = []

    def least(self, excess: NDArray[np.float64], deadline: float) -> float:
        """The seconds of the cheapest choices that free as much at every moment, or less; choices need not be whole until the last time."""
        bound, left = 0.0, excess
        for _ in range(_ROUNDS):
            self._moments += _worst(left, self._moments)
            if not self._moments:
                return 0.0  # packing is enough
            bound, chosen = self._solved(excess, deadline - time.thread_time(), whole=False)
            if chosen is None or time.thread_time() > deadline:
                return bound
            left = excess - self._freed(chosen)
            if left.max() <= _ROUNDING * excess.max():
                break
        return max(bound, self._solved(excess, min(_WHOLE_SECONDS, deadline - time.thread_time()), whole=True)[0])

    def _solved(self, excess: NDArray[np.float64], seconds: float, whole: bool) -> tuple[float, NDArray[np.float64] | None]:
        """What is proven, and the choices."""
        effects = np.array([self._effect(moment) for moment in self._moments])
        rules = [LinearConstraint(csr_array(effects * 2.0**-20), lb=excess[self._moments] * 2.0**-20), *self._in_order()]
        until: Any = {"time_limit": max(_LEAST_SECONDS, seconds), "mip_rel_gap": _GAP}
        with silence():
            kinds = np.full(self._count, int(whole))
            result = milp(self._seconds, constraints=rules, integrality=kinds, bounds=Bounds(0, 1), options=until)
        if result.status == _INFEASIBLE:
            return inf, None
        proven = result.mip_dual_bound if whole else result.fun if result.success else None
        return max(0.0, (proven or 0.0) * (1 - _ROUNDING)), result.x

    def _in_order(self) -> Iterator[LinearConstraint]:
        """No choice without the one before it."""
        if count := len(self._later):
            entries = np.repeat([1.0, -1.0], count), (np.tile(np.arange(count), 2), np.concatenate([self._later, self._later - 1]))
            yield LinearConstraint(csr_array(entries, shape=(count, self._count)), ub=0.0)

    def _effect(self, moment: int) -> NDArray[np.float64]:
        there = (self._from <= moment) & (moment <= self._to)
        return np.bincount(self._place[there], self._bytes[there], self._count).astype(np.float64)

    def _freed(self, chosen: NDArray[np.float64]) -> NDArray[np.float64]:
        """At each op."""
        change = np.zeros(self._ops + 1)
        np.add.at(change, self._from, self._bytes * chosen[self._place])
        np.add.at(change, self._to + 1, -self._bytes * chosen[self._place])
        freed: NDArray[np.float64] = np.cumsum(change)[: self._ops]
        return freed


def _worst(excess: NDArray[np.float64], known: Sequence[int]) -> list[int]:
    """The moments with the highest excess that are not beside a higher one."""
    chosen: list[int] = []
    for moment in np.argsort(-excess).tolist():
        if excess[moment] <= 0 or len(chosen) == _MOMENTS:
            break
        if moment not in known and all(abs(moment - other) > _APART for other in chosen):
            chosen.append(moment)
    return chosen
