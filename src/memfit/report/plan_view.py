"""What a plan tells, chosen once for every way of showing it: rows, words and their order; no colours, no widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.growth import left_behind, steps_in_words
from memfit.records import EXACTNESS, Alternative, Plan, PlannedLever
from memfit.units import format_bytes, format_seconds

_MOST_LOSERS = 3
_WORTH_SAYING = 0.01  # of the time
_TIMES = {
    "measured": ", predicted from ops timed on this machine",
    "measured in part": ", predicted from ops timed on this machine and, for the others, from estimates",
    "estimated": ", an estimate from the work and the bytes of each op",
}


@dataclass(frozen=True, slots=True)
class LeverRow:
    """A lever of a plan, or a way that lost: what it takes off the peak or the process, its words, and why."""

    saves: str
    name: str
    option: str
    facts: str
    why: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """Everything a plan shows, in the order it is shown."""

    setting: str
    answer: str
    figures: tuple[tuple[str, str, str], ...]  # how much, of what, and how it was come by
    levers: tuple[LeverRow, ...]
    losers: tuple[LeverRow, ...]
    reachable: tuple[tuple[str, str], ...]  # how much, and with what


def plan_view(plan: Plan) -> PlanView:
    """The rows and words of a plan."""
    return PlanView(
        f"budget {format_bytes(plan.budget_bytes)} · {plan.exactness} · {format_seconds(plan.planning_seconds)}",
        _answer(plan),
        tuple(_figures(plan)),
        tuple(map(_lever, plan.levers)),
        tuple(map(_loser, plan.alternatives[:_MOST_LOSERS])),
        tuple(_reachable(plan)),
    )


def slowdown_words(slowdown: float | None) -> str:
    """A ratio as people say it.

    >>> slowdown_words(1.2), slowdown_words(None), slowdown_words(1.0)
    ('1.20 of the time of the plain step', 'not timed', 'the time of the plain step')
    """
    if slowdown is None:
        return "not timed"
    return "the time of the plain step" if slowdown == 1 else f"{slowdown:.2f} of the time of the plain step"


def _answer(plan: Plan) -> str:
    steps = "" if plan.fits_steps is None else f" for {steps_in_words(plan.fits_steps)}"
    if not plan.levers:
        return f"It fits{steps} as it is: nothing has to be changed."
    count = len(plan.levers)
    return f"It fits{steps} with {count} technique{'s' * (count > 1)}."


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield format_bytes(plan.predicted_peak_bytes), "Peak", "predicted, of torch's allocator"
    yield format_bytes(plan.predicted_process_bytes), "Process", "predicted; the upper end of its interval is inside the budget"
    if plan.predicted_host_bytes:
        yield format_bytes(plan.predicted_host_bytes), "Host", "predicted, of the host's memory, with what is put away there"
    if plan.growth_bytes:
        yield format_bytes(plan.growth_bytes), "Growth", f"{left_behind(plan.growth_bytes)}; no technique helps against that"
    words = slowdown_words(plan.predicted_slowdown) + _TIMES.get(plan.times, "")
    yield "" if plan.predicted_slowdown is None else f"{plan.predicted_slowdown:.2f}", "Time", words
    if (plan.gap or 0.0) >= _WORTH_SAYING:
        yield f"{100 * (plan.gap or 0.0):.0f} %", "Gap", "at most: no plan of these levers can be faster by more"


def _lever(lever: PlannedLever) -> LeverRow:
    saves, of_process = lever.saves_bytes, lever.saves_process_bytes or 0
    facts = f"{lever.exactness}, {_cost(lever.costs_seconds)}"
    if saves <= 0 < of_process:  # fewer workers, or holes given back: the peak never held them
        return LeverRow(format_bytes(of_process), lever.name, lever.option, f"{facts}; off the process, beside the peak", lever.why)
    return LeverRow(format_bytes(saves), lever.name, lever.option, facts, lever.why)


def _cost(seconds: float | None) -> str:
    if seconds is None:
        return "not timed by itself"
    return f"{'costs' if seconds >= 0 else 'saves'} {format_seconds(abs(seconds))} a step"


def _loser(way: Alternative) -> LeverRow:
    return LeverRow("", way.name, way.option, f"{way.exactness}, {way.rejected_because}", "")


def _reachable(plan: Plan) -> Iterator[tuple[str, str]]:
    """The classes that reach the same in one row, and those that were not weighed, by their reason."""
    sizes = {word: size for word in EXACTNESS if (size := plan.reachable_bytes[word]) is not None}
    for size in dict.fromkeys(sizes.values()):
        word, *looser = (word for word in sizes if sizes[word] == size)
        more = f"; no lower with {_listed(looser)} ones" if looser else ""
        guessed = ", an estimate" if word in plan.estimated else ""
        yield format_bytes(size), f"with techniques that are {word} or stricter{guessed}{more}"
    for why in dict.fromkeys(plan.not_weighed.values()):
        words = [word for word, reason in plan.not_weighed.items() if reason == why]
        yield "", f"{'' if len(words) == len(EXACTNESS) else f'{_listed(words)}: '}not weighed, {why}"


def _listed(words: Sequence[str]) -> str:
    """As people list them.

    >>> _listed(["redrawn", "rounded", "altered"])
    'redrawn, rounded or altered'
    """
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
