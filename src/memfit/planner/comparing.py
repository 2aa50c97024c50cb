"""What a proposal was chosen over: combinations of which nothing was found that fits, and how fast a plan with any of them could be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from memfit.planner.combining import Combination
from memfit.planner.proposing import Limit, Proposal, Proposer, beside_the_peak


@dataclass(frozen=True)
class Unchosen:
    """A combination without a plan."""

    combination: Combination
    seconds: float  # no plan with it takes less; inf: none fits
    excess: int = 0  # where none fits: bytes of the peak that are too many at least
    was_looked_at: bool = True


@dataclass(frozen=True)
class Comparison:
    """Of one proposal with everything else that was weighed."""

    gap: float  # no plan that is believed to fit takes less than 1 - gap of the proposal's seconds
    unchosen: tuple[Unchosen, ...]  # the most promising first


def compared(proposer: Proposer, winner: Proposal, fitting: Sequence[Proposal], limit: Limit, seconds: float) -> Comparison:
    """Each combination with the least that a plan with it takes: worked out for those that could be faster, as long as there is time.

    A plan fits if it is believed to stay under the limit, or to take no more than the winner does. Of steps that would wait for their
    samples nobody knows the seconds, so they are compared only with one another.
    """
    looked_at, deadline = proposer.looked_at, time.thread_time() + seconds

    def room(combination: Combination) -> int:
        fixed, unsure = beside_the_peak(combination.ledger)
        return max(limit(combination), int((winner.process_high_bytes - fixed) / unsure))

    least, found = winner.seconds, list[Unchosen]()
    for place in sorted(proposer.places(winner.combination.waits), key=proposer.at_least):
        combination, bound, excess = proposer.combinations[place], proposer.at_least(place), 0
        if bound < winner.seconds and time.thread_time() < deadline:
            bound, excess = proposer.bound(place, room(combination), deadline - time.thread_time())
        least = min(least, bound)
        found.append(Unchosen(combination, bound, excess, place in looked_at))
    chosen = [_words(p.combination) for p in (winner, *fitting)]
    unchosen = [other for other in found if _words(other.combination) not in chosen and not _only_adds(other, winner)]
    return Comparison(1 - least / winner.seconds, tuple(_promising(unchosen)))


def _only_adds(other: Unchosen, winner: Proposal) -> bool:
    """Levers to those of the winner, and no speed: nobody would ask for that."""
    return other.combination.words > winner.combination.words and other.seconds >= winner.seconds


def _promising(unchosen: Sequence[Unchosen]) -> list[Unchosen]:
    """The fastest of each set of levers; at first two that may fit, then one that cannot, and so on."""
    best: dict[frozenset[str], Unchosen] = {}
    for other in sorted(unchosen, key=lambda other: other.seconds):
        best.setdefault(other.combination.words, other)
    able, unable = [o for o in best.values() if o.seconds < inf], [o for o in best.values() if o.seconds == inf]
    return [*able[:2], *unable[:1], *able[2:], *unable[1:]]


def _words(combination: Combination) -> list[tuple[str, str]]:
    """Which option of the loader it is makes no difference to seconds, and a milder one may have taken its place."""
    return [(o.lever, "" if o.lever == "loader" else o.name) for o in combination.options]
