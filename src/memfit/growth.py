"""Steps that leave memory behind: nothing fits such a training for ever, so whoever says "fits" says for how many steps."""

from __future__ import annotations

from typing import Any

from memfit.records import Ledger
from memfit.units import format_bytes

_AS_GOOD_AS_ANY = 1_000_000  # steps: trainings are not longer


def steps_inside(ledger: Ledger, budget: int) -> int | None:
    """How many steps, one after the other, stay inside a budget at the upper end of what they take; None: any number."""
    if ledger.growth_bytes <= 0:
        return None
    return max(0, 1 + (budget - ledger.process_high_bytes) // ledger.growth_bytes)


def lasts(ledger: Ledger, budget: int) -> bool:
    """Whether as many steps stay inside as a training may have."""
    steps = steps_inside(ledger, budget)
    return ledger.process_high_bytes <= budget and (steps is None or steps >= _AS_GOOD_AS_ANY)


def growth_facts(ledger: Ledger, budget: int) -> dict[str, Any]:
    """As a plan and a check have them."""
    return {"growth_bytes": ledger.growth_bytes, "fits_steps": steps_inside(ledger, budget)}


def steps_in_words(steps: int) -> str:
    """A count of steps.

    >>> steps_in_words(1), steps_in_words(2000)
    ('1 step', '2,000 steps')
    """
    return f"{steps:,} step{'s' * (steps != 1)}"


def left_behind(growth: int) -> str:
    """What each step does, and who says where."""
    return f"every step leaves {format_bytes(growth)} behind that nothing frees (memfit profile names the line)"
