"""A loss that is NaN or infinite is a fault of the step; the module where it first appears is named."""

from __future__ import annotations

import math
from typing import Any

import torch

from memfit.capture.whereabouts import ModulePath
from memfit.errors import StepError
from memfit.step import Step
from memfit.step.non_finite import first_non_finite


class FiniteLosses:
    """Watches a step and refuses to go on to backward from a loss that is not a finite number."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def enter(self, phase: str, loss: str) -> None:
        """Phases are of no interest here."""

    def saw_loss(self, name: str, loss: torch.Tensor) -> None:
        """Look at the value before anything is changed by it."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise StepError([f"the loss{f' of phase {name!r}' if name else ''} is {value}: {_told(_first_non_finite(self._step))}"])


def _told(where: str | None) -> str:
    if where is None:
        return "no module's output shows it, so it comes from the loss function itself (a log or a division by zero, say)"
    return f"it first appears in the output of {where}; look at its input range, learning rate or precision"


def _first_non_finite(step: Step) -> str | None:
    path = ModulePath(step.models)

    def run() -> None:
        carry: dict[str, Any] = {}
        with path:
            for phase in step.all_phases:
                phase.loss(step.model, step.batch, carry)

    return first_non_finite(run, lambda module: path.current)
