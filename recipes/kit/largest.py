"""The largest batch that a budget holds: as a step is, as people fix it by hand, and with memfit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.fitting.largest_batch import LargestBatch, largest_batch
from memfit.levers import LEVERS
from memfit.units import parse_bytes
from recipes.kit.measuring import apart

Forms = Mapping[str, Callable[[], Step]]
EXACT, WITHOUT_PARTS, ROUNDED = "memfit, exact", "memfit, exact, without micro-batches", "memfit, rounding allowed"


def largest_by_way(budget: str, forms: Forms, device: str, rounding: bool = False) -> dict[str, str]:
    """Predicted by simulation, for every form and for memfit. The first form is the original, the one that memfit is asked about.

    Each is asked in a process of its own: what one simulation leaves in a process would be taken from the budget of the next.
    """

    def asked(name: str, make: Callable[[], Step], allow: str | None) -> LargestBatch:
        print(f"the largest batch in {budget}: {name}", flush=True)
        return apart(_asked, make, budget, device, allow)

    (original, make), *by_hand = forms.items()
    found = asked(original, make, "reordered")
    cells = {original: in_words(found.plain, found)}
    cells |= {name: in_words(it.plain, it) for name, it in ((name, asked(name, made, None)) for name, made in by_hand)}
    cells |= {WITHOUT_PARTS: in_words(found.without_microbatch, found), EXACT: in_words(found.with_microbatch, found)}
    if rounding:  # more is allowed, so where exact levers reach the end of what is tried, these do
        full = found.with_microbatch == found.tried_up_to
        loose = found if full else asked(ROUNDED, make, "rounded")
        cells[ROUNDED] = in_words(max(loose.with_microbatch, found.with_microbatch), found)
    return cells


def in_words(batch: int, found: LargestBatch) -> str:
    """The end of what is tried is no limit.

    >>> in_words(7, LargestBatch(7, 8, 8, tried_up_to=8)), in_words(8, LargestBatch(7, 8, 8, tried_up_to=8))
    ('7', '8 or more')
    """
    return f"{batch} or more" if batch == found.tried_up_to else str(batch)


def _asked(make: Callable[[], Step], budget: str, device: str, allow: str | None) -> LargestBatch:
    """Of the step as it is where nothing is allowed."""
    step, levers = built_without_memory(make), LEVERS if allow else {}
    return largest_batch(step, parse_bytes(budget), allow=allow or "reordered", device=device, levers=levers, progress=print)
