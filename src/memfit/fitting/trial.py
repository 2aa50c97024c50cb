"""A fitted step really run for a while, and what it took."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memfit.capture.cuda_mark import mark_of
from memfit.fitting.fit import Fitted
from memfit.fitting.plan_rows import is_measured_as_a_whole
from memfit.growth import steps_inside
from memfit.profiling import profile
from memfit.records import Ledger
from memfit.step import Batch, Step
from memfit.units import format_bytes
from memfit.users_code import users_code


@dataclass(frozen=True)
class Trial:
    """Losses of real steps, and the fitted step's ledger: torch's allocator's events, and the mark of all the steps together."""

    fitted: Fitted
    measured: Ledger
    losses: tuple[float | dict[str, float], ...]

    @property
    def inside(self) -> bool:
        """Whether it stayed inside its budget."""
        return self.measured.process_bytes <= self.fitted.plan.budget_bytes

    def _how_it_ran_outside(self) -> str:
        taken, budget = format_bytes(self.measured.process_bytes), format_bytes(self.fitted.plan.budget_bytes)
        return f"It ran outside the budget: the process took {taken}, and the budget is {budget}."

    @property
    def losses_in_words(self) -> list[str]:
        """Short enough for a line of several."""
        return [f"{loss:.6g}" if isinstance(loss, float) else " + ".join(f"{v:.6g}" for v in loss.values()) for loss in self.losses]

    def to_dict(self) -> dict[str, Any]:
        """The fitted step's profile, and what it was compared with."""
        fitted = self.fitted
        slowdown, how = slowdown_of(fitted)
        return self.measured.to_dict() | {
            "schema": "memfit.fit/1",
            "baseline": fitted.baseline.to_dict(),
            "slowdown": slowdown,
            "slowdown_is": how,
            "slowdown_on_sample": _on_sample(fitted),
            "plan": fitted.plan.to_dict(),
            "verdict": fitted.verdict.to_dict(),
            "steps": len(self.losses),
            "losses": [_finite(loss) for loss in self.losses],
            "fits_steps": steps_inside(self.measured, fitted.plan.budget_bytes),
            "reason": None if self.inside else self._how_it_ran_outside(),
        }


def slowdown_of(fitted: Fitted) -> tuple[float | None, str]:
    """A ratio, measured where the proof could run the plain step on the whole batch beside the fitted one; else predicted."""
    seen = _on_sample(fitted)
    if seen is None or seen["samples"] < fitted.step.batch_size:
        return fitted.plan.predicted_slowdown, "predicted"
    return seen["slowdown"], "measured"


def _on_sample(fitted: Fitted) -> dict[str, Any] | None:
    """What the proof measured on its samples, a single step each; nothing where no lever, or not every one, was on."""
    verdict = fitted.verdict
    if not verdict.levers or verdict.not_compared or not verdict.step_seconds:
        return None
    return {"samples": verdict.samples, "slowdown": verdict.step_seconds["fitted"] / verdict.step_seconds["reference"]}


def try_out(fitted: Fitted, steps: int, progress: Callable[[str], None] = lambda words: None) -> Trial:
    """Train for so many steps, on the loader's batches where there is a loader; then look at one step more, which is rolled back."""
    losses = []
    with mark_of(fitted.step) as mark:
        for number, batch in enumerate(itertools.islice(_batches(fitted.step), steps), 1):
            losses.append(fitted(batch))
            progress(f"training, step {number} of {steps} done")
            del batch
    ledger = fitted.ledger if is_measured_as_a_whole(fitted.plan.levers) else profile(fitted.step, progress=progress)
    process = mark.bytes + ledger.process.workers_bytes
    seen = replace(ledger.process, measured_bytes=process)
    measured = replace(ledger, process=seen, process_bytes=process, process_low_bytes=process, process_high_bytes=process)
    return Trial(fitted, measured, tuple(losses))


def _batches(step: Step) -> Iterator[Batch]:
    """For ever: epoch after epoch of the loader, or the sample again and again."""
    loader: Iterable[Batch] | None = step.loader
    if loader is None:
        yield from itertools.repeat(step.batch)
    while loader is not None:
        empty = True
        with users_code("its loader"):
            for batch in loader:
                empty = False
                yield batch
        if empty:
            yield step.batch


def _finite(loss: float | dict[str, float]) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(loss, dict):
        return {name: _finite(value) for name, value in loss.items()}
    return loss if math.isfinite(loss) else None
