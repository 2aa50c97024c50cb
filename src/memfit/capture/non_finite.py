"""A loss that is NaN or infinite is a fault of the step; the module where it first appears is named."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from memfit.batches import tensors_in
from memfit.capture.whereabouts import ModulePath
from memfit.errors import StepError
from memfit.step import Step


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
            raise StepError([f"the loss{f' of phase {name!r}' if name else ''} is {value}: {_told(first_non_finite(self._step))}"])


def _told(where: str | None) -> str:
    if where is None:
        return "no module's output shows it, so it comes from the loss function itself (a log or a division by zero, say)"
    return f"it first appears in the output of {where}; look at its input range, learning rate or precision"


def first_non_finite(step: Step) -> str | None:
    """Run the forward passes again and name the first module whose output is not finite although its inputs are."""
    path = ModulePath(step.models)
    found: list[str] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if not found and not _finite(output) and _finite(args):
            found.append(f"{path.current or 'the model'} ({type(module).__name__})")

    handle = register_module_forward_hook(look)
    try:
        with path, torch.no_grad():
            carry: dict[str, Any] = {}
            for phase in step.all_phases:
                phase.loss(step.model, step.batch, carry)
    finally:
        handle.remove()
    return found[0] if found else None


def _finite(values: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for _, t in tensors_in(values) if t.is_floating_point())
