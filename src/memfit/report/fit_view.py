"""What a fitted run, a check and the table of levers tell: rows, words and their order; no colours, no widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.growth import left_behind, steps_in_words, steps_inside
from memfit.records import Ledger
from memfit.report.plan_view import slowdown_words
from memfit.units import format_bytes, format_seconds

_MOST_LOSSES = 6


@dataclass(frozen=True, slots=True)
class FitRow:
    """One figure of the plain step, of the fitted one as predicted, and as measured."""

    name: str
    plain: str
    predicted: str
    measured: str


@dataclass(frozen=True, slots=True)
class FitView:
    """Everything a fitted run shows, in the order it is shown."""

    setting: str
    answer: str
    inside: bool
    rows: tuple[FitRow, ...]
    facts: tuple[tuple[str, str], ...]


def fit_view(
    baseline: Ledger, predicted: Ledger, measured: Ledger, budget: int, slowdown: tuple[float | None, str], losses: Sequence[str]
) -> FitView:
    """The rows and words of a fitted run; `slowdown` is a ratio and how it was come by."""
    inside = measured.process_bytes <= budget
    rows = (
        FitRow("Peak", *map(format_bytes, (baseline.peak_bytes, predicted.peak_bytes, measured.peak_bytes))),
        FitRow("Process", *map(format_bytes, (baseline.process_bytes, predicted.process_bytes, measured.process_bytes))),
    )
    seconds = "" if measured.step_seconds is None else f", {format_seconds(measured.step_seconds)} a step here"
    shown = ["…", *losses[-_MOST_LOSSES:]] if len(losses) > _MOST_LOSSES else losses
    return FitView(
        f"budget {format_bytes(budget)} · {len(losses)} step{'s' * (len(losses) != 1)}",
        f"It ran {'inside' if inside else 'outside'} the budget: {format_bytes(measured.process_bytes)} of {format_bytes(budget)}.",
        inside,
        rows,
        (("Time", _time(*slowdown) + seconds), ("Losses", ", ".join(shown)), *_growth(measured, budget)),
    )


def _growth(measured: Ledger, budget: int) -> Iterator[tuple[str, str]]:
    """What a longer run would meet."""
    if (steps := steps_inside(measured, budget)) is not None:
        yield "Growth", f"{left_behind(measured.growth_bytes)}: there is room for {steps_in_words(max(0, steps - 1))} more"


def _time(ratio: float | None, how: str) -> str:
    return slowdown_words(ratio) + ("" if ratio in (None, 1.0) else f" ({how})")


@dataclass(frozen=True, slots=True)
class CheckView:
    """Everything a check shows."""

    setting: str
    good: bool
    answer: str
    reason: str
    grown: tuple[tuple[str, str], ...]


def check_view(fits: bool, budget: int, device: str, reason: str, grown: Sequence[Mapping[str, str | int]]) -> CheckView:
    """The rows and words of a check."""
    rows = tuple((f"+{format_bytes(int(row['bytes']))}", str(row["module"]) or "outside of modules") for row in grown)
    answer = "Does not fit" if not fits else "Fits, but has grown" if grown else "Fits"
    return CheckView(f"{device} · budget {format_bytes(budget)}", fits and not grown, answer, reason, rows)
