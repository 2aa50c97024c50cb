"""`memfit check`'s answer: whether a step is predicted to fit, and what grew since a committed record."""

from __future__ import annotations

from memfit.errors import MemfitError
from memfit.growth import lasts, left_behind, steps_in_words, steps_inside
from memfit.records import Ledger
from memfit.units import format_bytes

_NEXT_TO_NOTHING = 1 / 20  # of the tolerance, as a share of the whole peak: a few bytes under a new name fail nobody's build


def parse_tolerance(text: str) -> float:
    """A share, written as a percentage.

    >>> parse_tolerance("2%"), parse_tolerance("0.5 %")
    (0.02, 0.005)
    """
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not (text.strip().endswith("%") and 0 <= share < 100):
        raise MemfitError(f"{text!r} is not a tolerance: write a percentage from 0% up, as in 2%.")
    return share


def why_it_fits(ledger: Ledger, budget: int) -> tuple[bool, str]:
    """Whether the upper end of what the process is predicted to take is inside the budget, also after as many steps as there may be."""
    high, room = ledger.process_high_bytes, budget - ledger.process_high_bytes
    predicted = f"the process is predicted to take {format_bytes(ledger.process_bytes)}, at most {format_bytes(high)}"
    if room >= 0:
        steps, fits = steps_inside(ledger, budget), lasts(ledger, budget)
        many = "" if steps is None else f" for {steps_in_words(steps)}{'' if fits else ' only'}"
        growing = "" if steps is None else f", and {left_behind(ledger.growth_bytes)}"
        return fits, f"It fits {format_bytes(budget)}{many}: {predicted}{growing}."
    kinds = sorted(ledger.by_category.items(), key=lambda item: -item[1])[:2]
    filled = " and ".join(f"{category} ({format_bytes(size)})" for category, size in kinds if size)
    return False, f"It does not fit {format_bytes(budget)}: {predicted}, {format_bytes(-room)} too much. The peak is mostly {filled}."


def refuse_incomparable(baseline: Ledger, now: Ledger, profiled: str) -> None:
    """Only a prediction for the same device and batch differs from this one by what the step itself has become."""
    differences = [
        *(["it was measured, and this is predicted"] if not baseline.predicted else []),
        *([f"it is for {baseline.device}, and this is for {now.device}"] if baseline.device != now.device else []),
        *([f"its batch is {baseline.batch_size}, and this one's is {now.batch_size}"] if baseline.batch_size != now.batch_size else []),
    ]
    if differences:
        raise MemfitError(
            f"The baseline cannot be compared with: {'; '.join(differences)}. Make one that can: memfit profile {profiled} --json > FILE"
        )


def grown_since(baseline: Ledger, now: Ledger, tolerance: float) -> list[dict[str, str | int]]:
    """The modules that hold more at the peak than they did, by more than the tolerance, the largest growth first.

    What is next to nothing beside the whole peak is left out, unless the peak itself grew beyond the tolerance: little by little it may.
    """
    peak_grew = now.peak_bytes - baseline.peak_bytes > tolerance * baseline.peak_bytes
    floor = 0.0 if peak_grew else tolerance * _NEXT_TO_NOTHING * baseline.peak_bytes
    grown = [(module, size - baseline.by_module.get(module, 0)) for module, size in now.by_module.items()]
    over = [(module, more) for module, more in grown if more > max(floor, tolerance * baseline.by_module.get(module, 0))]
    return [{"module": module, "bytes": more} for module, more in sorted(over, key=lambda row: -row[1])]
