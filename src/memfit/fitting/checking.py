"""`memfit check`'s answer: whether a step is predicted to fit, and what grew since a committed record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    """Only a prediction under the same conditions differs from this one by what the step itself has become."""
    differences = [
        *(["it was measured, and this is predicted"] if not baseline.predicted else []),
        *([f"it is for {baseline.device}, and this is for {now.device}"] if baseline.device != now.device else []),
        *([f"its batch is {baseline.batch_size}, and this one's is {now.batch_size}"] if baseline.batch_size != now.batch_size else []),
        *(["an earlier memfit made it, and it does not say under which conditions"] if not baseline.conditions else []),
        *_other_conditions(baseline.conditions, now.conditions),
    ]
    if differences:
        raise MemfitError(
            f"The baseline cannot be compared with: {'; '.join(differences)}. Make one that can: memfit profile {profiled} --json > FILE"
        )


def _other_conditions(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for fact in dict.fromkeys((*then, *now)) if then else ():
        if then.get(fact) != now.get(fact):
            yield f"its {fact} is {then.get(fact, 'none')}, and this one's is {now.get(fact, 'none')}"


def grown_since(baseline: Ledger, now: Ledger, tolerance: float) -> list[dict[str, str | int]]:
    """The modules that hold more at their highest moment than they did, by more than the tolerance, the largest growth first.

    What is next to nothing beside the whole peak is left out, unless the peak itself grew beyond the tolerance: little by little it may.
    Then those that hold more at the peak are told as well: none of them need hold more than it ever did for more to meet there.
    """
    peak_grew = now.peak_bytes - baseline.peak_bytes > tolerance * baseline.peak_bytes
    floor = 0.0 if peak_grew else tolerance * _NEXT_TO_NOTHING * baseline.peak_bytes
    grown = _over(baseline.most_by_module, now.most_by_module, floor, tolerance)
    if peak_grew:
        at_peak = _over(baseline.by_module, now.by_module, floor, tolerance)
        grown |= {module: max(more, grown.get(module, 0)) for module, more in at_peak.items()}
    return [{"module": module, "bytes": more} for module, more in sorted(grown.items(), key=lambda row: -row[1])]


def _over(then: Mapping[str, int], now: Mapping[str, int], floor: float, tolerance: float) -> dict[str, int]:
    grown = {module: size - then.get(module, 0) for module, size in now.items()}
    return {module: more for module, more in grown.items() if more > max(floor, tolerance * then.get(module, 0))}
