"""The fastest combination of levers and table of saved tensors whose process fits the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memfit.levers.saved.line import line_of
from memfit.planner.combining import Combination, Rewriter, combinations
from memfit.planner.costs import seconds_of, slower_in_parts
from memfit.planner.search import Search, Table
from memfit.records import EXACTNESS, Ledger, Speeds

Limit = Callable[[Ledger], int]
_AT_ONCE = 4  # combinations among which the time that is left is divided
_LEAST_SECONDS = 0.1
_SECONDS_OF_A_PART = 2e-5  # an operator: Python, and random draws that are cut up


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
    """Everything that was weighed for one step."""

    plain_seconds: float
    fitting: list[Proposal] = field(default_factory=list)  # fastest first
    lowest: Proposal | None = None
    reachable: dict[str, int] = field(default_factory=dict)  # the lowest process under each class of exactness

    def weigh(self, proposal: Proposal) -> None:
        """Remember the lowest, whatever it costs."""
        if self.lowest is None or proposal.process_high_bytes < self.lowest.process_high_bytes:
            self.lowest = proposal
        needed = max((EXACTNESS.index(option.exactness) for option in proposal.combination.options), default=0)
        for word in EXACTNESS[needed:]:
            self.reachable[word] = min(self.reachable.get(word, proposal.process_high_bytes), proposal.process_high_bytes)


class Proposer:
    """For one step: asked for several budgets, it keeps what it worked out."""

    def __init__(self, ledger: Ledger, levers: Mapping[str, Rewriter], allowed: str, speeds: Speeds, disk: bool = True) -> None:
        self.speeds, self.disk = speeds, disk
        self.tables = "saved" in levers
        self.combinations = list(combinations(ledger, levers, allowed))
        self._searches: dict[int, Search] = {}
        self._seconds: dict[int, float] = {}
        self._of_wholes: dict[int, tuple[float, int]] = {}  # seconds and ops of ledgers that are divided

    def propose(self, limit: Limit, seconds: float) -> Proposals:
        """Weigh combinations; what stays under `limit`, the peak that a ledger's step may have, comes fastest first.

        Those that are fastest without any table come first, and those that are slower than what was found are left out. When the time
        is over and nothing fits, only those are still looked at that divide the batch most or need no table.
        """
        result = Proposals(self._base(0))
        deadline = time.thread_time() + seconds
        order = sorted(range(len(self.combinations)), key=self._at_least)
        most = max(combination.repeats for combination in self.combinations)
        for turn, place in enumerate(order):
            if result.fitting and self._at_least(place) >= min(p.seconds for p in result.fitting):
                break
            left = deadline - time.thread_time()
            if left < 0 and 1 < self.combinations[place].repeats < most and (left < -seconds or not self._fits_as_it_is(place, limit)):
                continue
            self._weigh(place, limit, max(_LEAST_SECONDS, left / min(_AT_ONCE, len(order) - turn)), result)
        result.fitting.sort(key=lambda proposal: (proposal.seconds, len(proposal.combination.options)))
        return result

    def _fits_as_it_is(self, place: int, limit: Limit) -> bool:
        ledger = self.combinations[place].ledger
        return ledger.peak_bytes <= limit(ledger)

    def _at_least(self, place: int) -> float:
        """What `_base` gives or a little less, without making the line of a micro-batch: all of them together do the whole batch's work."""
        combination = self.combinations[place]
        if combination.repeats == 1:
            return self._base(place)
        if id(combination.whole) not in self._of_wholes:
            trace = combination.whole.trace
            assert trace is not None
            self._of_wholes[id(combination.whole)] = float(seconds_of(trace, self.speeds).sum()), len(trace.ops)
        seconds, ops = self._of_wholes[id(combination.whole)]
        return seconds * self._slower(combination) + ops * _SECONDS_OF_A_PART * combination.repeats + combination.beside

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
            extra = len(seconds) * _SECONDS_OF_A_PART if combination.repeats > 1 else 0.0
            each = (float(seconds.sum()) - once) * self._slower(combination) + extra
            self._seconds[place] = once + each * combination.repeats + combination.beside
        return self._seconds[place]

    def _search(self, place: int) -> Search:
        if place not in self._searches:
            trace = self.combinations[place].ledger.trace
            assert trace is not None
            self._searches[place] = Search(line_of(trace), seconds_of(trace, self.speeds), self.speeds, self.disk)
        return self._searches[place]

    def _weigh(self, place: int, limit: Limit, seconds: float, result: Proposals) -> None:
        search, combination = self._search(place), self.combinations[place]
        fixed, unsure = beside_the_peak(combination.ledger)
        most = limit(combination.ledger)
        tables = self.tables and combination.slowdown is None
        untouched = Table({}, search.plain.peak, 0.0)
        table = search.fastest(most, seconds) if tables else untouched if untouched.peak <= most else None
        lowest = search.lowest() if tables else untouched
        for found in {id(t): t for t in (table, lowest) if t is not None}.values():
            whole = self._base(place) + found.seconds * combination.repeats * self._slower(combination)
            proposal = Proposal(combination, found, whole, fixed + int(found.peak * unsure))
            result.weigh(proposal)
            if found is table:
                result.fitting.append(proposal)


def beside_the_peak(ledger: Ledger) -> tuple[int, float]:
    """What a process takes whatever the peak is, and at most for each byte of it: the heap's slack grows with it."""
    fixed = ledger.process.base_bytes + ledger.process.workers_bytes
    return fixed, (ledger.process_high_bytes - fixed) / ledger.peak_bytes


def peak_inside(budget: int, most: int) -> Limit:
    """The peak at which a process is still inside a budget, and at most `most`: what an earlier capture has shown to be too high."""

    def limit(ledger: Ledger) -> int:
        fixed, unsure = beside_the_peak(ledger)
        return min(most, int((budget - fixed) / unsure))

    return limit
