"""A few training steps run and written down: losses, the gradients of the first two, what the first left, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.proof.places import Places
from memfit.proof.sampling import Batches
from memfit.proof.shelf import Key, Shelf
from memfit.step import Phase, Step
from memfit.step.running import Guard

_LOOKED_INTO = ("gradients", "later")  # what is kept of the first steps' gradients, which takes time


@dataclass
class Outcome:
    """What a run of a few steps gave."""

    shelf: Shelf = field(default_factory=Shelf)
    losses: list[dict[str, float]] = field(default_factory=list)  # of each step, by phase
    failure: str = ""  # why it could not be run
    refused: bool = False  # by a lever that would not be put on
    skipped: int = 0  # steps that a guard did not let happen
    seconds: list[float] = field(default_factory=list)  # of each step

    @property
    def step_seconds(self) -> float | None:
        """Of the shortest step that ran without being looked into; None where every one was."""
        return min(self.seconds[len(_LOOKED_INTO) :], default=None)


@dataclass(frozen=True)
class FittedRun:
    """A fitted step's runs."""

    outcome: Outcome
    fed: Outcome  # its optimizers on the plain step's gradients
    unseen: frozenset[Key]  # gradients that were gone before anyone could look
    eps: float  # of the coarsest type its levers use
    exact: Callable[[], Outcome] = Outcome  # its first step in float64, run when it is first asked for


def observe(step: Step, places: Places, batches: Batches, *wanted: str) -> Outcome:
    """Run a step on each batch; the first is looked at closely, and the second for what the first has left in a lever's hands."""
    outcome = Outcome(Shelf(*wanted))
    for number in range(len(batches)):
        watcher = _GradientsKept(step, places, outcome, _LOOKED_INTO[number] if number < len(_LOOKED_INTO) else "")
        with _guard_watched(step, watcher):
            started = time.perf_counter()
            losses = step.run(batches[number], watcher, schedule=False)
            outcome.seconds.append(time.perf_counter() - started)
        if number == 0:
            places.shelve_state(step, outcome.shelf)
        outcome.losses.append({name or "loss": float(loss) for name, loss in losses.items()})
    places.shelve_parameters(outcome.shelf, "end")
    places.shelve_averages(outcome.shelf, "end ")
    return outcome


def feed(step: Step, places: Places, source: Shelf) -> Outcome:
    """Let the optimizers step on the gradients another run had, and write down what they made of them."""
    outcome = Outcome()
    guard, step.running.guard = step.running.guard, None  # these gradients are not scaled
    try:
        for phase in step.all_phases:
            for key, parameter in places.gradients(step, phase):
                parameter.grad = source.get(key).to(parameter.device, parameter.dtype) if key in source else None
            step.update(phase)
            for optimizer in phase.optimizers:
                if optimizer in step.running.steps_in_backward:
                    optimizer.step()
                optimizer.zero_grad()
    finally:
        step.running.guard = guard
    places.shelve_parameters(outcome.shelf)
    places.shelve_states(step, outcome.shelf)
    return outcome


class _GradientsKept:
    """Writes down a phase's gradients when they are complete, and before they are clipped."""

    def __init__(self, step: Step, places: Places, outcome: Outcome, kind: str) -> None:
        self._step, self._places, self.outcome, self._kind = step, places, outcome, kind
        self._phases: dict[str, Phase] = {phase.name: phase for phase in step.all_phases}

    def enter(self, phase: str, loss: str) -> None:
        """A guard, where there is one, first brings gradients back to scale; `_guard_watched` calls then."""
        if phase == "optimizer" and self._step.running.guard is None:
            self.keep(loss)

    def saw_loss(self, name: str, loss: torch.Tensor) -> None:
        """Losses are taken from the step's answer."""

    def keep(self, phase: str) -> None:
        """Inside backward, gradients come and go one by one: whatever is there is kept."""
        for key, parameter in self._places.gradients(self._step, self._phases[phase], self._kind):
            if parameter.grad is not None and self._kind:
                self.outcome.shelf.put(key, parameter.grad)


@contextmanager
def _guard_watched(step: Step, watcher: _GradientsKept) -> Iterator[None]:
    guard = step.running.guard
    if guard is not None:
        step.running.guard = _WatchedGuard(guard, watcher)
    try:
        yield
    finally:
        step.running.guard = guard


class _WatchedGuard:
    """A guard's own answers, with a look at the gradients once they are back to scale."""

    def __init__(self, guard: Guard, watcher: _GradientsKept) -> None:
        self._guard, self._watcher = guard, watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guard, name)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """As the guard says."""
        return self._guard.scaled(loss)

    def lets_step(self, phase: str, optimizers: Sequence[Optimizer]) -> bool:
        """As the guard says."""
        answer = self._guard.lets_step(phase, optimizers)
        self._watcher.keep(phase)
        self._watcher.outcome.skipped += not answer
        return answer
