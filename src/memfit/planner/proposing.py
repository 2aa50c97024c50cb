"""The fastest combination of levers and table of saved tensors whose process fits the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memfit.levers.saved.line import line_of
from memfit.planner.combining import Combination, Rewriter, combinations
from memfit.planner.costs import seconds_of
from memfit.planner.search import Search, Table
from memfit.records import Ledger, Speeds

Limit = Callable[[Ledger], int]


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

    def weigh(self, proposal: Proposal) -> None:
        """Remember the lowest, whatever it costs."""
        if self.lowest is None or proposal.process_high_bytes < self.lowest.process_high_bytes:
            self.lowest = proposal


class Proposer:
    """For one step: asked for several budgets, it keeps what it worked out."""

    def __init__(self, ledger: Ledger, levers: Mapping[str, Rewriter], allowed: str, speeds: Speeds, disk: bool = True) -> None:
        self.speeds, self.disk = speeds, disk
        self.combinations = list(combinations(ledger, levers, allowed))
        self._searches: dict[int, Search] = {}

    def propose(self, limit: Limit, seconds: float) -> Proposals:
        """Weigh every combination; what stays under `limit`, the peak that a ledger's step may have, comes fastest first."""
        plain = self._search(0)
        result = Proposals(float(plain.evaluation.seconds.sum()))
        deadline = time.monotonic() + seconds
        for place, combination in enumerate(self.combinations):
            share = (deadline - time.monotonic()) / (len(self.combinations) - place)
            self._weigh(place, combination, limit, max(0.05, share), result)
        result.fitting.sort(key=lambda proposal: (proposal.seconds, len(proposal.combination.options)))
        return result

    def _search(self, place: int) -> Search:
        if place not in self._searches:
            trace = self.combinations[place].ledger.trace
            assert trace is not None  # rewritten ledgers carry theirs
            self._searches[place] = Search(line_of(trace), seconds_of(trace, self.speeds), self.speeds, self.disk)
        return self._searches[place]

    def _weigh(self, place: int, combination: Combination, limit: Limit, seconds: float, result: Proposals) -> None:
        search, ledger = self._search(place), combination.ledger
        fixed, unsure = beside_the_peak(ledger)
        table = search.fastest(limit(ledger), seconds)
        for found in {id(t): t for t in (table, search.lowest()) if t is not None}.values():
            whole = (float(search.evaluation.seconds.sum()) + found.seconds) * combination.repeats
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
