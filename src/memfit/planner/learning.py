"""What captures of proposals have taught about those to come: how much higher peaks are, and how much more the heap holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memfit.planner.combining import Combination
from memfit.planner.proposing import Limit, Proposal, beside_the_peak
from memfit.records import Ledger

_A_LITTLE = 1 << 20
_MORE = 1.06  # times what is believed: what the heap holds beside a peak that levers have lowered (captures gave 0.92 to 1.07)
_LEAST_SLOPE = 0.05  # of a process with its peak, as far as it is relied on: below, a lower peak is given over to other levers
_SHRINKING = 0.25  # of what it would in proportion: what the heap holds beside the peak, at a lower one (captures gave 0 to 1.1)


@dataclass
class Learnt:
    """For one budget; called with a combination, it gives the peak at which its process is still inside."""

    budget: int
    higher: dict[frozenset[str], int] = field(default_factory=dict)  # by levers: bytes of the peak
    heaps: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)  # by their use: peaks seen, and the slack beside them

    def __call__(self, combination: Combination) -> int:
        """As it is believed, or lower where the heap was seen to hold more: with these levers, or with others that leave it alone."""
        fixed, unsure = beside_the_peak(combination.ledger)
        room = self.budget - fixed
        believed = room / (1 + _MORE * (unsure - 1))
        seen = self.heaps.get(_heap_of(combination), ())
        if len(seen) == 1:
            ((peak, slack),) = seen
            shrinking = _SHRINKING * (unsure - 1)  # the highest peak with peak + slack = room, where slack shrinks with it
            believed = min(believed, (room - slack + shrinking * peak) / (1 + shrinking))
        elif seen:
            believed = min(believed, _on_the_line(seen, room))
        return int(believed) - self.higher.get(combination.words, 0)

    def lowered(self, share: float) -> Limit:
        """The same, brought down to a share of it."""
        return lambda combination: int(share * self(combination))

    def from_capture(self, proposal: Proposal, captured: Ledger) -> None:
        """Of a proposal that did not fit after all."""
        words, (fixed, _) = proposal.combination.words, beside_the_peak(proposal.combination.ledger)
        slack = captured.process_high_bytes - fixed - captured.peak_bytes
        self.higher[words] = max(self.higher.get(words, 0), captured.peak_bytes - proposal.peak_bytes + _A_LITTLE)
        self.heaps.setdefault(_heap_of(proposal.combination), []).append((captured.peak_bytes, slack))


def _on_the_line(seen: Sequence[tuple[int, int]], room: int) -> float:
    """The peak at which peak and slack would come to the room, going on from the least that was seen as they went until there.

    A heap may hold as much more as the peak is lower: then no table helps, and what is asked for is so low that other levers come.

    Upwards, where others were seen that have more beside their peak whatever the heap does, each byte counts.

    >>> _on_the_line([(100, 20), (90, 20)], 105), _on_the_line([(100, 20), (90, 30)], 110), _on_the_line([(100, 20), (90, 30)], 125)
    (85.0, -110.0, 95.0)
    """
    least, at = min((peak + slack, peak) for peak, slack in seen)
    slopes = [(peak + slack - least) / (peak - at) for peak, slack in seen if peak != at]
    slope = min(1.0, max(_LEAST_SLOPE, min(slopes, default=1.0))) if least > room else 1.0
    return at - (least - room) / slope


def _heap_of(combination: Combination) -> tuple[int, str]:
    """Into how many parts the batch is taken, and what the allocator is told."""
    return combination.repeats, next((option.name for option in combination.options if option.lever == "allocator"), "")
