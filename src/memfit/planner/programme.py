"""The integer programme over the table of saved tensors: which results to make again, so that every moment fits, at least cost.

A moment is an op of the line, or (number of ops + op) the remakings just before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack, lil_array

from memfit.levers.saved.table import CACHE, RECOMPUTE, STORED
from memfit.planner.away import Away
from memfit.planner.candidates import Candidate
from memfit.planner.silence import silence

_AGAIN, _ONCE, _AWAY, _HOLD = range(4)  # made again whenever it is read; made again once; put away; held only so that others can be made
_WAYS = 4
_GAP = 0.01  # to the best, of what is called solved
_NEAR = 1.15  # times the cost of choices that need not be whole: a good table has it, and polishing takes more off
_LEAVE_MEMORY = (_AGAIN, _ONCE, _AWAY)
Cost = Callable[[int, str], float]


class Programme:
    """Built once for a line; solved for one set of limits after the other.

    Variables: four for each candidate, then three for each pair (a source and what is made from it), which are 1 where the second is
    made again and the first is not in memory, for each of the ways in which it may not be.
    """

    def __init__(self, candidates: Mapping[int, Candidate], ops: int, cost: Cost, away: Away) -> None:
        self.ops, self.away = ops, away
        self.words = {_AGAIN: RECOMPUTE, _ONCE: CACHE, _AWAY: away.word}
        self.found = list(candidates.values())
        self.place = {candidate.op: index for index, candidate in enumerate(self.found)}
        self.pairs = [(self.place[source], index) for index, c in enumerate(self.found) for source in c.inputs]
        self.first_pair = _WAYS * len(self.found)
        self.count = self.first_pair + 3 * len(self.pairs)
        self.costs = self._costs(cost)
        self._logic = self._rules()
        self._effects: dict[int, NDArray[np.float64]] = {}

    def _costs(self, cost: Cost) -> NDArray[np.float64]:
        costs = np.zeros(self.count)
        for index, candidate in enumerate(self.found):
            once, reads = cost(candidate.op, RECOMPUTE), len(candidate.windows)
            costs[_WAYS * index + _AGAIN] = once * max(1, reads)
            costs[_WAYS * index + _ONCE] = once
            costs[_WAYS * index + _AWAY] = cost(candidate.op, self.away.word) * (1 + reads)
        for number, (source, _) in enumerate(self.pairs):
            costs[self.first_pair + 3 * number + _AGAIN] = cost(self.found[source].op, RECOMPUTE)
            costs[self.first_pair + 3 * number + _AWAY] = cost(self.found[source].op, self.away.word)
        return costs

    def solve(self, moments: Sequence[int], excess: Sequence[float], limit: float) -> dict[int, str] | None:
        """Decisions that free `excess` bytes at each moment, or as much of it as can be; None where the time was too short."""
        scale, short = 2.0**-20, len(moments)
        effects = np.array([self.effect(moment) for moment in moments]) * scale
        enough = LinearConstraint(np.hstack([effects, np.eye(short)]), lb=np.array(excess) * scale)
        rules = [LinearConstraint(hstack([matrix, csr_array((matrix.shape[0], short))]).tocsr(), lb, ub) for matrix, lb, ub in self._logic]
        if isfinite(self.away.room):
            put_away = np.concatenate([self._put_away(), np.zeros(short)])
            rules.append(LinearConstraint(put_away[None] * scale, ub=self.away.room * scale))
        with silence():
            chosen = self._minimized([enough, *rules], short, limit)
        if chosen is None:
            return None
        return {c.op: how for i, c in enumerate(self.found) for way, how in self.words.items() if chosen[_WAYS * i + way] > 0.5}

    def _minimized(self, constraints: Sequence[LinearConstraint], short: int, limit: float) -> NDArray[np.float64] | None:
        """Most choices are whole without being asked to be: those are left so, which is ten times quicker, unless that costs much more."""
        costs = np.concatenate([self.costs, np.full(short, 10 * self.costs.sum())])
        bounds = Bounds(0, np.concatenate([self._most(), np.full(short, np.inf)]))
        whole = np.arange(len(costs)) < self.first_pair

        def solved(within: Bounds, integral: NDArray[np.bool_]) -> Any:
            kinds, until = integral.astype(np.int64), {"time_limit": limit, "mip_rel_gap": _GAP}
            return milp(costs, constraints=constraints, integrality=kinds, bounds=within, options=until)  # type: ignore[arg-type]

        free = solved(bounds, np.zeros_like(whole))
        if free.x is not None:
            decided = Bounds(np.where(whole & (free.x > 1 - _GAP), 1, 0), np.where(whole & (free.x < _GAP), 0, bounds.ub))
            near = solved(decided, whole)
            if near.x is not None and near.fun <= _NEAR * free.fun:
                return cast("NDArray[np.float64]", near.x)
        return cast("NDArray[np.float64] | None", solved(bounds, whole).x)

    def _most(self) -> NDArray[np.float64]:
        most = np.ones(self.count)
        if not self.away.word:
            most[_AWAY : self.first_pair : _WAYS] = 0
        return most

    def _put_away(self) -> NDArray[np.float64]:
        """Bytes that each choice puts into the other place."""
        sizes = np.zeros(self.count)
        sizes[_AWAY : self.first_pair : _WAYS] = [candidate.bytes for candidate in self.found]
        return sizes

    def freed(self, ops: Mapping[int, str], moment: int) -> float:
        """What the programme believes a table frees at a moment."""
        chosen = np.zeros(self.count)
        for op, how in ((op, how) for op, how in ops.items() if op in self.place):
            way = _AWAY if how in STORED else _ONCE if how == CACHE else _AGAIN
            chosen[_WAYS * self.place[op] + way] = 1
        for number, (source, user) in enumerate(self.pairs):
            if chosen[_WAYS * user + _AGAIN] + chosen[_WAYS * user + _ONCE]:
                ways = chosen[_WAYS * source : _WAYS * source + 3]
                chosen[self.first_pair + 3 * number : self.first_pair + 3 * number + 3] = ways
                if not self.found[source].windows:
                    chosen[_WAYS * source + _HOLD] = 1 - ways.sum()
        return float(self.effect(moment) @ chosen)

    def effect(self, moment: int) -> NDArray[np.float64]:
        """Bytes that each choice frees at a moment; what lives longer than before counts against."""
        if moment not in self._effects:
            self._effects[moment] = self._effect(moment % self.ops)
        return self._effects[moment]

    def _effect(self, op: int) -> NDArray[np.float64]:
        effect = np.zeros(self.count)
        for index, c in enumerate(self.found):
            place = _WAYS * index
            if not c.windows:
                effect[place + _HOLD] = -c.bytes if c.died < op <= self._needed_until(index) else 0
            elif c.passes < op <= c.died:
                away = 0 if any(read <= op <= end for read, end in c.windows) else c.bytes
                effect[place + _AGAIN] = effect[place + _AWAY] = away
                effect[place + _ONCE] = c.bytes if op < c.windows[0][0] else 0
        for number, (source, user) in enumerate(self.pairs):
            made, asked = self.found[source], [read for read, _ in self.found[user].windows]
            place = self.first_pair + 3 * number
            if asked and made.windows and made.passes < op < made.windows[0][0]:
                effect[place + _AGAIN] = effect[place + _AWAY] = -made.bytes if op in asked else 0
                effect[place + _ONCE] = -made.bytes if asked[0] <= op else 0
        return effect

    def _needed_until(self, index: int) -> int:
        """When the last of what is made from it has been made."""
        users = [self.found[user] for source, user in self.pairs if source == index]
        return max((end for user in users for _, end in user.windows), default=-1)

    def _rules(self) -> list[tuple[csr_array, float, float]]:
        """One way each; made from something only if that is held or made again; a pair is 1 where both of it are."""
        count, pairs = len(self.found), self.pairs
        one = lil_array((count, self.count))
        for index in range(count):
            one[index, _WAYS * index : _WAYS * index + _WAYS] = 1
        there, both = lil_array((len(pairs), self.count)), lil_array((3 * len(pairs), self.count))
        for row, (source, user) in enumerate(pairs):
            made_again = slice(_WAYS * user, _WAYS * user + 2)
            if not self.found[source].windows:
                there[row, _WAYS * source : _WAYS * source + _WAYS] = 1
                there[row, made_again] = -1
            for way in _LEAVE_MEMORY:
                both[3 * row + way, self.first_pair + 3 * row + way] = 1
                both[3 * row + way, _WAYS * source + way] = -1
                both[3 * row + way, made_again] = -1
        return [(one.tocsr(), -np.inf, 1), (there.tocsr(), 0, np.inf), (both.tocsr(), -1, np.inf)]
