"""What captures of proposals have taught about those to come: how much higher peaks are, and how much more the heap holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.planner.combining import Combination
from memfit.planner.proposing import Proposal, beside_the_peak
from memfit.records import Ledger

_A_LITTLE = 1 << 20
_MORE = 1.06  # times what is believed: what the heap holds beside a peak that levers have lowered (captures gave 0.92 to 1.07)
_SHRINKING = 0.25  # of what it would in proportion: what the heap holds beside the peak, at a lower one (captures gave 0 to 1.1)


@dataclass
class Learnt:
    """For one budget; called with a combination, it gives the peak at which its process is still inside."""

    budget: int
    higher: dict[frozenset[str], int] = field(default_factory=dict)  # by levers: bytes of the peak
    heaps: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)  # by their use: peaks seen, and the slack beside them

    def __call__(self, combination: Combination) -> int:
        """As it is believed, or lower where the heap was seen to hold more: with these levers, or with others that leave it alone.

        The highest peak with peak + slack = room, where the slack that was seen beside one peak shrinks with it, but only a quarter as
        fast as in proportion.
        """
        fixed, unsure = beside_the_peak(combination.ledger)
        room = self.budget - fixed
        seen = self.heaps.get(_heap_of(combination), ())
        shrinking = _SHRINKING * (unsure - 1) if len(seen) == 1 else 0.0  # a second surprise, and it is not relied on at all
        peaks = [(room - slack + shrinking * peak) / (1 + shrinking) for peak, slack in seen]
        return int(min(room / (1 + _MORE * (unsure - 1)), *peaks, room)) - self.higher.get(combination.words, 0)

    def from_capture(self, proposal: Proposal, captured: Ledger) -> None:
        """Of a proposal that did not fit after all."""
        words = proposal.combination.words
        fixed = captured.process.base_bytes + captured.process.workers_bytes
        slack = captured.process_high_bytes - fixed - captured.peak_bytes
        self.higher[words] = max(self.higher.get(words, 0), captured.peak_bytes - proposal.peak_bytes + _A_LITTLE)
        self.heaps.setdefault(_heap_of(proposal.combination), []).append((captured.peak_bytes, slack))


def _heap_of(combination: Combination) -> tuple[int, str]:
    """Into how many parts the batch is taken, and what the allocator is told."""
    return combination.repeats, next((option.name for option in combination.options if option.lever == "allocator"), "")
