"""A loss that reaches none of the parameters its optimizers train is a fault of the step, seen when it is first looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from memfit.errors import StepError
from memfit.step import Phase, Step, Watcher, parameters_of


@contextmanager
def reaching(step: Step, watcher: Watcher) -> Iterator[Watcher]:
    """Another watcher's eyes, and ours: before a phase's optimizers step, its loss must have reached what they train."""
    looking = _Reaching(step, watcher)
    with ExitStack() as hooks:
        for parameter in {p for phase in step.all_phases for p in parameters_of(phase.optimizers) if p.requires_grad}:
            hooks.callback(parameter.register_post_accumulate_grad_hook(looking.arrived).remove)
        yield looking


class _Reaching:
    """A gradient may be gone again after backward, so each is noted as it arrives; one that is there counts as well."""

    def __init__(self, step: Step, watcher: Watcher) -> None:
        self._phases = {phase.name: phase for phase in step.all_phases}
        self._watcher, self._now = watcher, ""
        self._reached: set[int] = set()

    def arrived(self, parameter: torch.Tensor) -> None:
        self._reached.add(id(parameter))

    def enter(self, phase: str, loss: str) -> None:
        if loss != self._now:  # what another phase's loss reached says nothing of this one's
            self._reached.clear()
            self._now = loss
        if phase == "optimizer":
            self._refuse_unreached(self._phases[loss])
        self._watcher.enter(phase, loss)

    def saw_loss(self, name: str, loss: torch.Tensor) -> None:
        self._watcher.saw_loss(name, loss)

    def _refuse_unreached(self, phase: Phase) -> None:
        if any(id(p) in self._reached or p.grad is not None for p in parameters_of(phase.optimizers)):
            return
        loss = f"the loss of phase {phase.name!r}" if phase.name else "the loss"
        trains = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in phase.optimizers))
        raise StepError(
            [
                f"{loss} reaches none of the parameters that {trains} trains, so it would train nothing: look for detach(), a copy of the "
                "model in the loss, or an optimizer that was made for other parameters"
            ]
        )
