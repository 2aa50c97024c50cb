"""The fastest combination of levers and table of saved tensors whose process fits the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, prod

from memfit.levers.saved.line import line_of
from memfit.planner.away import away_from
from memfit.planner.bound import least_seconds
from memfit.planner.combining import Combination, Rewriter, combinations, is_allowed, milder
from memfit.planner.costs import seconds_of, slower_in_parts
from memfit.planner.search import Search, Table
from memfit.planner.watching import SECONDS_OF_A_LOOK
from memfit.records import Ledger, Option, Speeds

Limit = Callable[[Combination], int]
_AT_ONCE = 4  # combinations among which the time is divided in which the lowest is looked for
_LEAST_SECONDS = 0.1
_A_LOOK = 0.05  # of the time
_SECONDS_OF_A_CALL = 1.2e-5  # whatever its size: what each operator of a further micro-batch adds; four models gave 0 to 27e-6


@dataclass(frozen=True)
class Proposal:
    """A combination, the table under it, and what they are believed to give."""

    combination: Combination
    table: Table
    seconds: float  # of the whole step
    process_high_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Of torch's allocator."""
        return self.table.peak


@dataclass
class Proposals:
    """What was found for one limit."""

    plain_seconds: float
    fitting: list[Proposal]  # fastest first


class Proposer:
    """For one step: asked for several budgets, it keeps what it worked out."""

    def __init__(self, ledger: Ledger, levers: Mapping[str, Rewriter], allowed: str, speeds: Speeds, host_room: float = inf) -> None:
        self.speeds, self.away = speeds, away_from(ledger.device, host_room)
        self.tables = "saved" in levers
        self._plain, self._levers = ledger, levers
        self.combinations = list(combinations(ledger, levers, allowed))
        self._refused = set[frozenset[str]]()
        self._searches: dict[int, Search] = {}
        self._seconds: dict[int, float] = {}
        self._of_wholes: dict[int, tuple[float, int]] = {}  # seconds and ops of ledgers that are divided

    def propose(self, limit: Limit, seconds: float) -> Proposals:
        """Weigh combinations; what stays under `limit`, the peak that a combination's step may have, comes fastest first.

        Those that are fastest without any table come first, and those that are slower than what was found are left out, as are those
        that no table can bring under the limit. The most promising of them get most of the time. When it is over, only those are
        still looked at that need no table, and in the end only those that divide the batch most or not at all. Those in which a step
        waits for its samples, nobody knows how long, are for where nothing else fits.
        """
        for waits in (False, True):
            places = [place for place in self.places() if self.combinations[place].waits == waits]
            if found := self._weighed(sorted(places, key=self.at_least), limit, seconds):
                break
        fitting = sorted(found.values(), key=lambda p: (p.seconds, len(p.combination.options)))
        return Proposals(self._base(0), [self._mildest(proposal, limit) for proposal in fitting])

    def _mildest(self, proposal: Proposal, limit: Limit) -> Proposal:
        """The same table with the mildest option of the loader under which it fits."""
        for combination in milder(self._plain, self._levers, proposal.combination):
            if proposal.peak_bytes <= limit(combination):
                fixed, unsure = beside_the_peak(combination.ledger)
                return replace(proposal, combination=combination, process_high_bytes=fixed + int(proposal.peak_bytes * unsure))
        return proposal

    def _weighed(self, order: list[int], limit: Limit, seconds: float) -> dict[int, Proposal]:
        deadline, found = time.thread_time() + seconds, dict[int, Proposal]()
        most = max((self.combinations[place].repeats for place in order), default=1)
        for place in order:  # a first look, so that much is known to be slower before time is spent on it
            left = deadline - time.thread_time()
            if self._is_slower(place, found) or (found and left < seconds / 2):
                break
            combination = self.combinations[place]
            between = 1 < combination.repeats < most
            if between and (left < -seconds or (left < 0 and combination.ledger.peak_bytes > limit(combination))):
                continue
            self._look(place, limit, max(_LEAST_SECONDS, _A_LOOK * seconds), found)
        while (started := time.thread_time()) < deadline:
            self._look_on(order, limit, deadline, found)
            if time.thread_time() - started < _LEAST_SECONDS:
                break  # nobody has anything left to try
        return found

    def _look_on(self, order: list[int], limit: Limit, deadline: float, found: dict[int, Proposal]) -> None:
        """At each that may still win, for half of the time that is left; the most promising first: a first table costs twice the last."""
        for place in sorted(order, key=lambda place: self.at_least(place) + found[place].seconds if place in found else inf):
            left = deadline - time.thread_time()
            if left > 0 and not self._is_slower(place, found):
                self._look(place, limit, left / 2, found)

    def _look(self, place: int, limit: Limit, seconds: float, found: dict[int, Proposal]) -> None:
        proposal = self._fastest(place, limit(self.combinations[place]), seconds)
        if proposal is not None:
            found[place] = proposal

    def _is_slower(self, place: int, found: dict[int, Proposal]) -> bool:
        """Whether it could not be faster than what was found, whatever its table."""
        return bool(found) and self.at_least(place) >= min(p.seconds for p in found.values())

    def lowest(self, allowed: str, seconds: float) -> Proposal | None:
        """The lowest process of all, whatever it costs, with techniques of an exactness; None where every combination was refused.

        As many as there is time for are looked at: those that divide the batch most, and need least as they are, come first.
        """
        places = [place for place in self.places() if all(is_allowed(option, allowed) for option in self.combinations[place].options)]
        most = max((self.combinations[place].repeats for place in places), default=1)
        places = [place for place in places if self.combinations[place].repeats in (1, most)]
        places.sort(key=lambda place: (-self.combinations[place].repeats, self.combinations[place].whole.process_high_bytes))
        deadline = time.thread_time() + seconds
        found: list[Proposal] = []
        for place in places:
            left = deadline - time.thread_time()
            if found and left < 0:
                break
            found.append(self._lowest(place, max(_LEAST_SECONDS, left / _AT_ONCE)))
        return min(found, key=lambda p: (p.process_high_bytes, p.seconds), default=None)

    def costs_of(self, proposal: Proposal) -> dict[str, float]:
        """Seconds that each lever adds after those before it; of one that leaves the step's operators as they are nothing is known."""
        options, known = proposal.combination.options, [_timed(combination.options) for combination in self.combinations]
        seconds = [self._base(known.index(_timed(options[:count]))) for count in range(len(options) + 1)]
        words = [*(option.lever for option in options), "saved"]
        pairs = zip(words, pairwise([*seconds, proposal.seconds]), strict=True)
        return {word: after - before for word, (before, after) in pairs if after != before}

    def refuse(self, combination: Combination) -> None:
        """Never propose these levers together again: the step did not take them."""
        self._refused.add(combination.words)

    def refuse_lever(self, word: str) -> None:
        """Never propose this lever again: the step does not take it in any company."""
        self._refused |= {combination.words for combination in self.combinations if word in combination.words}

    @property
    def looked_at(self) -> frozenset[int]:
        """The combinations for which a table was looked for, by place."""
        return frozenset(self._searches)

    def places(self, waits: bool = True) -> list[int]:
        """Of the combinations that were not refused; without `waits` those in which no step waits for its samples."""
        able = (place for place, combination in enumerate(self.combinations) if combination.words not in self._refused)
        return [place for place in able if waits or not self.combinations[place].waits]

    def bound(self, place: int, limit: int, seconds: float) -> tuple[float, int]:
        """The seconds that no plan with a combination undercuts; inf, and how far above the limit its peak stays, where none fits."""
        combination = self.combinations[place]
        if not self._has_tables(combination):
            excess = max(0, combination.ledger.peak_bytes - limit)
            return inf if excess else self._base(place), excess
        search = self._search(place)
        least = least_seconds(search, limit, seconds)
        return self._base(place) + least * combination.repeats * self._slower(combination), max(0, search.floor - limit)

    def at_least(self, place: int) -> float:
        """What `_base` gives or a little less, without making the line of a micro-batch: all of them together do the whole batch's work."""
        combination = self.combinations[place]
        if combination.repeats == 1:
            return self._base(place)
        if id(combination.whole) not in self._of_wholes:
            trace = combination.whole.trace
            assert trace is not None
            self._of_wholes[id(combination.whole)] = float(seconds_of(trace, self.speeds).sum()), len(trace.ops)
        seconds, ops = self._of_wholes[id(combination.whole)]
        return seconds * self._slower(combination) + ops * _SECONDS_OF_A_CALL * (combination.repeats - 1) + combination.beside

    def _slower(self, combination: Combination) -> float:
        """Of a batch in parts, for the work that grows with it."""
        trace = combination.whole.trace
        assert trace is not None
        return 1.0 if combination.repeats == 1 else slower_in_parts(trace, combination.options[-1].settings["size"])

    def _base(self, place: int) -> float:
        """Seconds of a step with a combination on, and no table; every part of a batch costs a little by itself."""
        if place not in self._seconds:
            combination = self.combinations[place]
            if combination.slowdown is not None:
                return self._base(0) * combination.slowdown
            assert combination.ledger.trace is not None  # rewritten ledgers carry theirs
            seconds = seconds_of(combination.ledger.trace, self.speeds)
            once = float(seconds[[op.phase == "optimizer" for op in combination.ledger.trace.ops]].sum())
            calls = len(seconds) * _SECONDS_OF_A_CALL * (combination.repeats - 1)
            each = (float(seconds.sum()) - once) * self._slower(combination)
            self._seconds[place] = once + each * combination.repeats + calls + self._replaying(combination) + combination.beside
        return self._seconds[place]

    def _replaying(self, combination: Combination) -> float:
        """What it takes to give each micro-batch the whole batch's random numbers: masks are packed and unpacked, operators watched."""
        draws = combination.options[-1].settings["draws"] if combination.repeats > 1 else {}
        if not draws or combination.whole.trace is None:
            return 0.0
        values = sum(float(prod(shape)) for told in draws.values() for _, shape, *_ in told)
        watched = combination.repeats * sum(op.phase == "forward" for op in combination.whole.trace.ops)
        return 2 * values / self.speeds.bits + watched * SECONDS_OF_A_LOOK

    def _search(self, place: int) -> Search:
        if place not in self._searches:
            trace = self.combinations[place].ledger.trace
            assert trace is not None
            self._searches[place] = Search(line_of(trace), seconds_of(trace, self.speeds), self.speeds, self.away)
        return self._searches[place]

    def _has_tables(self, combination: Combination) -> bool:
        return self.tables and combination.slowdown is None

    def _fastest(self, place: int, limit: int, seconds: float) -> Proposal | None:
        if self._has_tables(self.combinations[place]):
            table = self._search(place).fastest(limit, seconds)
            return None if table is None else self._proposal(place, table)
        return self._untouched(place) if self.combinations[place].ledger.peak_bytes <= limit else None

    def _lowest(self, place: int, seconds: float) -> Proposal:
        if self._has_tables(self.combinations[place]):
            return self._proposal(place, self._search(place).lowest(seconds))
        return self._untouched(place)

    def _untouched(self, place: int) -> Proposal:
        return self._proposal(place, Table({}, self.combinations[place].ledger.peak_bytes, 0.0))

    def _proposal(self, place: int, table: Table) -> Proposal:
        combination = self.combinations[place]
        fixed, unsure = beside_the_peak(combination.ledger)
        seconds = self._base(place) + table.seconds * combination.repeats * self._slower(combination)
        return Proposal(combination, table, seconds, fixed + int(table.peak * unsure))


def beside_the_peak(ledger: Ledger) -> tuple[int, float]:
    """What a process takes whatever the peak is, and at most for each byte of it: the heap's slack grows with it."""
    fixed = ledger.process.base_bytes + ledger.process.workers_bytes
    return fixed, (ledger.process_high_bytes - fixed) / ledger.peak_bytes


def _timed(options: Sequence[Option]) -> list[Option | None]:
    """Which option of the loader it is makes no difference to the seconds of a step, and a milder one has no combination of its own."""
    return [None if option.lever == "loader" else option for option in options]
