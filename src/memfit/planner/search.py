"""The fastest table of saved tensors under a limit: the integer programme proposes, the exact schedule disposes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isinf

import numpy as np
from numpy.typing import NDArray

from memfit.levers.saved import block_insides, masks, unread_inputs
from memfit.levers.saved.line import Line
from memfit.levers.saved.table import BITS, CACHE, DROP, RECOMPUTE, STORED, TIMES
from memfit.planner.away import Away
from memfit.planner.candidates import Candidate, candidate_of, candidates_of, unread_stretches
from memfit.planner.evaluation import Evaluation, Outcome
from memfit.planner.every_table import every_table
from memfit.planner.inquiry import Inquiry
from memfit.planner.programme import Programme
from memfit.records import Speeds

_TIGHTER = (1.0, 0.96, 0.92, 0.86, 0.8)  # the programme knows no remakings on the way, so it is asked for more than is needed
_STARTING, _PROPOSING, _DESCENDING = 0.3, 0.7, 0.85  # of the time: until when each goes on; the rest takes decisions back
_FEW = 8  # candidates: every choice between keeping and making again is tried, and where there are fewer every other, too
_MOST_EXCHANGES = 1000


@dataclass
class Table:
    """Decisions and what they give."""

    ops: dict[int, str]
    peak: int = 0
    seconds: float = 0.0

    def beats(self, other: Table) -> bool:
        """Whether it needs no more memory and no more time."""
        return self.peak <= other.peak and self.seconds <= other.seconds


class Search:
    """For one line; asked for several limits, it remembers what it tried."""

    def __init__(self, line: Line, seconds: NDArray[np.float64], speeds: Speeds, away: Away) -> None:
        self.evaluation = Evaluation(line, seconds, speeds)
        self.always = unread_inputs(line)  # it costs nothing
        self.masks = {op: candidate_of(line, op) for op in masks(line)}
        self.plain = self.evaluation.of({})
        self.candidates = candidates_of(line, self.plain.peak)
        self.away = away
        self.ways = [*TIMES, RECOMPUTE, *([away.word] if away.word else [])]
        self._every_table = every_table(self)
        self._started = set[int]()  # limits
        self._settled: dict[int, Table] = {}  # by limit: no single change makes it faster
        self._settled_in_pairs: dict[int, Table] = {}  # nor do two
        self._inquiries: dict[tuple[int, int], Inquiry] = {}  # by limit and aim
        self.known: list[Table] = [Table({}, self.plain.peak, 0.0)]  # of all that were tried, those that none beats in both

    @cached_property
    def programme(self) -> Programme:
        """Built when it is first asked."""
        return Programme(self.candidates, len(self.evaluation.seconds), self.evaluation.cost, self.away)

    @cached_property
    def barest(self) -> NDArray[np.int64]:
        """What is alive while each op runs, with everything packed that can be."""
        return self.evaluation.of(self.packed({})).alive[: len(self.evaluation.seconds)]

    @cached_property
    def floor(self) -> int:
        """No table has a lower peak: at every moment, what would be left if each result were away whenever nobody reads it."""
        line, left = self.evaluation.line, self.barest.copy()
        for storage in (s for op in self.candidates for s in line.made[op]):
            for first, last in unread_stretches(line, storage):
                left[first : last + 1] -= line.trace.storages[storage].bytes
        return int(left.max())

    def _seed(self) -> None:
        """Tables people know: every block made again, at each grain of blocks, and everything put away; the search starts from them too."""
        saved = {op for op, c in self.candidates.items() if c.windows}
        for inside in block_insides(self.evaluation.line):
            self.tried(self.packed({op: CACHE for op in inside & self.candidates.keys()}))
            if self.away.word:
                ways = {op: CACHE if op in inside else self.away.word for op in saved | (inside & self.candidates.keys())}
                self.tried(self.packed(ways))
        if self.away.word:
            self.tried(self.packed(dict.fromkeys(saved, self.away.word)))

    def fastest(self, limit: int, seconds: float = 4.0) -> Table | None:
        """The fastest table found whose peak is at most `limit`; None where none was found. Asked again, it looks further."""
        started = time.thread_time()  # the search's own time: on a busy machine the same plan, only later
        deadline, asked_again = started + seconds, limit in self._settled
        if self.plain.peak > limit:
            if self.floor > limit:
                return None
            self._start(limit, started + _STARTING * seconds, deadline)
            self._ask_programme(limit, started + _PROPOSING * seconds)
            if self._fastest_known(limit) is None:
                self._descend(limit, started + _DESCENDING * seconds, deadline)
        best = self._fastest_known(limit)
        if best is None:
            return None
        best = self._improved(best, limit, deadline)
        return self._in_pairs(best, limit, deadline) if asked_again else best

    def _fastest_known(self, limit: int) -> Table | None:
        return min((t for t in self.known if t.peak <= limit), key=lambda t: t.seconds, default=None)

    def _start(self, limit: int, soon: float, deadline: float) -> None:
        """What is found at once, and made better for a while: where the programme is slow, that is already good."""
        if not self._started:
            self._seed()
        if limit not in self._started:
            self._started.add(limit)
            self._greedily(limit, deadline)
        best = self._fastest_known(limit)
        if best is not None:
            self._improved(best, limit, soon)

    def _ask_programme(self, limit: int, deadline: float) -> None:
        """Until one of its proposals fits; where there are few choices, each is tried instead."""
        if len(self.candidates) <= _FEW:
            while time.thread_time() < deadline and next(self._every_table, None):
                pass
            return
        for aim in (int(limit * tighter) for tighter in _TIGHTER):
            inquiry = self._inquiries.setdefault((limit, aim), Inquiry(self, aim, limit))
            inquiry.go_on(deadline)
            if inquiry.fits or time.thread_time() > deadline:
                return

    def _improved(self, best: Table, limit: int, deadline: float) -> Table:
        """As long as single changes make it faster, and there is time."""
        while best.ops and self._settled.get(limit) is not best and time.thread_time() < deadline:
            better = self._exchange(self._polish(best, limit, deadline), limit, deadline)
            if better is best and time.thread_time() < deadline:
                self._settled[limit] = best
            best = better
        return best

    def _in_pairs(self, best: Table, limit: int, deadline: float) -> Table:
        """Two decisions changed at once, where no single change helps any more; one of them is less than what is done now."""
        decided = best.ops.keys() - self.always.keys() if self._settled_in_pairs.get(limit) is not best else ()
        for op, other in product(sorted(decided), sorted(self.candidates.keys() | self.masks.keys())):
            for ops in (both for one in self._changed(best.ops, op) for both in self._changed(one, other) if op != other):
                if time.thread_time() > deadline:
                    return best
                table, _ = self.tried(ops)
                if table.peak <= limit and table.seconds < best.seconds:
                    return self._in_pairs(self._improved(table, limit, deadline), limit, deadline)
        self._settled_in_pairs[limit] = best
        return best

    def lowest(self, seconds: float) -> Table:
        """The table with the lowest peak that is found in that time, or was before."""
        self.fastest(self.floor, seconds)
        return self._lowest_known()

    def _lowest_known(self) -> Table:
        return min(self.known, key=lambda table: (table.peak, table.seconds))

    def tried(self, ops: dict[int, str]) -> tuple[Table, Outcome]:
        """What a table gives; it is remembered if none that is known beats it."""
        ops = {**self.always, **ops}
        outcome = self.evaluation.of(ops)
        # What nobody asks for again is not decided: being ready to make it takes time.
        ops = {op: do for op, do in ops.items() if op in outcome.again or do in (*STORED, DROP)}
        table = Table(ops, outcome.peak, outcome.seconds)
        if self._has_room(ops) and not any(known.beats(table) for known in self.known):
            self.known = [known for known in self.known if not table.beats(known)] + [table]
        return table, outcome

    def packed(self, ops: dict[int, str]) -> dict[int, str]:
        """A table with all masks in bits; those that are not worth it are taken back when the table is polished."""
        return {**self.always, **dict.fromkeys(self.masks, BITS), **ops}

    def _has_room(self, ops: dict[int, str]) -> bool:
        """Whether the other place holds all that would be put there, taken to be there at once."""
        if isinf(self.away.room):
            return True
        return sum(self.candidates[op].bytes for op, do in ops.items() if do == self.away.word and op in self.candidates) <= self.away.room

    def _greedily(self, limit: int, deadline: float) -> None:
        """Always what frees most at the highest moment for its seconds: seldom the best, but found at once, as are all on the way."""
        ops: dict[int, str] = {}
        table, outcome = self.tried(ops)
        while table.peak > limit and time.thread_time() < deadline:
            moment = int(outcome.alive.argmax()) % len(self.evaluation.before)
            changes = [(c, self._freeing(c, moment)) for c in (self.candidates | self.masks).values() if c.is_away_at(moment)]
            changes = [(c, way) for c, way in changes if ops.get(c.op) not in (way, RECOMPUTE, *STORED)]
            if not changes:
                return
            best, way = max(changes, key=lambda change: change[0].bytes / max(1e-9, self._cost(*change)))
            ops = {**ops, best.op: way}
            table, outcome = self.tried(ops)

    def _freeing(self, candidate: Candidate, moment: int) -> str:
        """The cheapest decision that keeps a result out of memory at a moment."""
        if candidate.op in self.masks:
            return BITS
        again = CACHE if moment < candidate.windows[0][0] else RECOMPUTE
        return min((again, self.away.word) if self.away.word else (again,), key=lambda way: self._cost(candidate, way))

    def _cost(self, candidate: Candidate, way: str) -> float:
        reads = len(candidate.windows)
        return {CACHE: 1, RECOMPUTE: reads}.get(way, 1 + reads) * self.evaluation.cost(candidate.op, way)

    def _descend(self, limit: int, soon: float, deadline: float) -> None:
        """From the table that is nearest above the limit; where none fits then, from those that make everything again, too."""
        above = min((t for t in self.known if t.peak > limit), key=lambda t: t.peak, default=self._lowest_known())
        self._descend_from(above.ops, limit, soon)
        for start in (above.ops, *(dict.fromkeys(self.candidates, way) for way in (RECOMPUTE, CACHE))):
            if time.thread_time() < deadline and not any(t.peak <= limit for t in self.known):
                self._descend_from(self.packed(start), limit, deadline)

    def _descend_from(self, start: dict[int, str], limit: int, deadline: float) -> None:
        """One change after the other: the one that takes most off the excess for its seconds; two at once where one does not help."""
        table, outcome = self.tried(start)
        while table.peak > limit and time.thread_time() < deadline:
            moves = self._moves(self._neighbours(table.ops, outcome), table, outcome, limit, deadline)
            moves = moves or self._moves(self._second_neighbours(table.ops, outcome), table, outcome, limit, deadline)
            if not moves:
                return
            _, table, outcome = max(moves, key=lambda move: move[0])

    def _moves(
        self, tables: Iterator[dict[int, str]], table: Table, outcome: Outcome, limit: int, deadline: float
    ) -> list[tuple[float, Table, Outcome]]:
        """Those of the tables that are nearer to the limit, with what they gain for each second."""
        excess, moves = _excess(outcome, limit), []
        for ops in tables:
            other, result = self.tried(ops)
            less = excess - _excess(result, limit)
            if less > 0:
                moves.append((less / max(1e-6, other.seconds - table.seconds), other, result))
            if time.thread_time() > deadline:
                break
        return moves

    def _neighbours(self, ops: dict[int, str], outcome: Outcome) -> Iterator[dict[int, str]]:
        """Tables that differ in one decision that matters at the highest moment."""
        moment = int(outcome.alive.argmax()) % len(self.evaluation.before)
        for op, c in self.candidates.items():
            if c.passes < moment and (c.died >= moment or op in ops):
                yield from self._changed(ops, op)

    def _second_neighbours(self, ops: dict[int, str], outcome: Outcome) -> Iterator[dict[int, str]]:
        """Tables that differ in two such decisions."""
        for first in self._neighbours(ops, outcome):
            yield from self._neighbours(first, outcome)

    def _changed(self, ops: dict[int, str], op: int) -> Iterator[dict[int, str]]:
        for change in (None, *(self.ways if op in self.candidates else ()), *((BITS,) if op in self.masks else ())):
            changed = {k: v for k, v in ops.items() if k != op} | ({op: change} if change else {})
            if change != ops.get(op) and (change != self.away.word or self._has_room(changed)):
                yield changed

    def _polish(self, best: Table, limit: int, deadline: float) -> Table:
        """Take back decisions, or make once what was made several times, wherever it still fits; the dearest first."""
        dearest = {op: -self.evaluation.cost(op, best.ops[op]) for op in best.ops.keys() - self.always.keys()}
        for op in sorted(dearest, key=lambda op: dearest[op]):
            for ops in self._changed(best.ops, op):
                if time.thread_time() > deadline:
                    return best
                table, _ = self.tried(ops)
                if table.peak <= limit and table.seconds < best.seconds:
                    best = table
                    break
        return best

    def _exchange(self, best: Table, limit: int, deadline: float) -> Table:
        """Another result in place of a decided one, as long as that is faster and fits."""
        decided = best.ops.keys() - self.always.keys() - self.masks.keys()
        if len(decided) * len(self.candidates) > _MOST_EXCHANGES:
            return best
        for op, other in product(sorted(decided), sorted(self.candidates.keys() - decided)):
            if time.thread_time() > deadline:
                return best
            table, _ = self.tried({**{k: v for k, v in best.ops.items() if k != op}, other: CACHE})
            if table.peak <= limit and table.seconds < best.seconds:
                return self._exchange(table, limit, deadline)
        return best


def _excess(outcome: Outcome, limit: int) -> float:
    return float(np.maximum(outcome.alive - limit, 0).sum())
