"""What the user hands over: model(s), loss(es), optimizer(s), a sample batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import StepError
from memfit.step.batches import batch_size, map_tensors
from memfit.step.faults import faults_of, loss_faults
from memfit.step.in_backward import stepped_in_backward
from memfit.step.running import Part, Running, interrupts_held_back
from memfit.step.samples import sample_places

Loss = Callable[..., torch.Tensor]
Batch = Any


class Scheduler(Protocol):
    """Anything with `step()`, as torch's learning-rate schedulers have."""

    def step(self) -> None:
        """Move on by one step."""


class Watcher(Protocol):
    """Told where in the step we are, so that a recorder can label what it sees."""

    def enter(self, phase: str, loss: str) -> None:
        """The step begins forward, backward or optimizer of a loss."""

    def saw_loss(self, name: str, loss: torch.Tensor) -> None:
        """A loss has been computed; its backward comes next."""


@dataclass(frozen=True)
class Phase:
    """One loss with its own optimizer: generator, then discriminator. `loss(models, batch, carry)` gives a scalar.

    >>> net = nn.Linear(2, 1)
    >>> Phase("critic", lambda models, batch, carry: models(batch).mean(), torch.optim.SGD(net.parameters(), 0.1)).name
    'critic'
    """

    name: str
    loss: Loss
    optimizer: Optimizer | Sequence[Optimizer]
    clip_grad_norm: float | None = None
    scheduler: Scheduler | Sequence[Scheduler] | None = None

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The phase's optimizers, also when there is only one."""
        return (self.optimizer,) if isinstance(self.optimizer, Optimizer) else tuple(self.optimizer)

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """The phase's schedulers, also when there is one or none."""
        if self.scheduler is None:
            return ()
        return tuple(self.scheduler) if isinstance(self.scheduler, Sequence) else (self.scheduler,)


@dataclass(frozen=True)
class Step:
    """One training step: `loss(model, batch)` is a scalar, the mean over the batch.

    >>> net = nn.Linear(4, 1)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4))
    >>> step.batch_size
    2

    Give `phases` instead of `loss` and `optimizer` when several losses are trained in turn; they share the dict `carry`, whose
    tensors are detached between phases. `weight(batch)` is what a micro-batch counts for (default: its number of samples).
    `variants` are other steps you would accept, a name and a factory each: {"half the channels": build_small}.
    """

    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]
    loss: Loss | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    batch: Batch = None
    weight: Callable[[Batch], float] | None = None
    phases: Sequence[Phase] = field(default=())
    loader: Iterable[Batch] | None = None
    clip_grad_norm: float | None = None
    scheduler: Scheduler | Sequence[Scheduler] | None = None
    variants: Mapping[str, Callable[[], Step]] = field(default_factory=dict)
    running: Running = field(default_factory=Running, repr=False, compare=False)  # what levers put on; the user gives nothing here

    def __post_init__(self) -> None:
        if faults := faults_of(self):
            raise StepError(faults)
        if self.running.places is None:
            self.running.places = sample_places(self.batch, self.batch_size)

    @property
    def batch_size(self) -> int:
        """The number of samples in the sample batch."""
        return batch_size(self.batch)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The step's models by name; a single one is named ''."""
        if isinstance(self.model, nn.Module):
            return {"": self.model}
        return dict(self.model) if isinstance(self.model, Mapping) else {str(i): m for i, m in enumerate(self.model)}

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """The phases; a step with one loss is one phase named ''."""
        if self.phases:
            return tuple(self.phases)
        assert self.loss is not None and self.optimizer is not None  # faults_of saw to it
        loss = self.loss
        return (Phase("", lambda model, batch, _carry: loss(model, batch), self.optimizer, self.clip_grad_norm, self.scheduler),)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Every optimizer of every phase, each once."""
        return tuple(dict.fromkeys(o for phase in self.all_phases for o in phase.optimizers))

    def run(self, batch: Batch, watcher: Watcher | None = None, schedule: bool = True) -> dict[str, torch.Tensor]:
        """One training step on `batch`: for each phase zero_grad, loss, backward, clip, optimizer; then the schedulers."""
        carries: dict[int, Any] = {}
        losses = {}
        for phase in self.all_phases:
            for optimizer in phase.optimizers:
                optimizer.zero_grad()
            losses[phase.name] = self.differentiate(phase, batch, carries, watcher)
            self.update(phase, watcher)
        if schedule:
            for scheduler in (s for phase in self.all_phases for s in phase.schedulers):
                scheduler.step()
        for call in self.running.after_step:
            call()
        return losses

    def differentiate(
        self, phase: Phase, batch: Batch, carries: dict[int, Any] | None = None, watcher: Watcher | None = None
    ) -> torch.Tensor:
        """The phase's loss, and its gradients added to the parameters'. Each part of the batch has a carry of its own."""
        total: torch.Tensor | None = None
        carries = {} if carries is None else carries

        def enter(stage: str) -> None:
            if watcher:
                watcher.enter(stage, phase.name)

        stepping = self.running.stepping_in_backward(phase.optimizers)
        for number, part in enumerate(self.running.parts(phase.name, batch)):
            carry = carries.setdefault(number, {})
            if self.running.guard:
                self.running.guard.begins(phase.name, number, part.batch, carry)
            with part.around():
                loss = self._part_loss(phase, part, carry, watcher)
                if part.share != 1.0:
                    loss = loss * part.share
                enter("backward")
                with stepped_in_backward(stepping, enter, self.running.before_update):
                    (self.running.guard.scaled(loss) if self.running.guard else loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
            del loss
            carries[number] = map_tensors(torch.Tensor.detach, carry)
        assert total is not None  # a batch has at least one part
        return total

    def _part_loss(self, phase: Phase, part: Part, carry: dict[str, Any], watcher: Watcher | None) -> torch.Tensor:
        if watcher:
            watcher.enter("forward", phase.name)
        with part.around_loss(), self.running.surroundings(phase.name):
            loss = phase.loss(self.model, part.batch, carry)
        if faults := loss_faults(phase.name, loss):
            raise StepError(faults)
        for call in self.running.saw_loss:
            call(loss)
        if watcher:
            watcher.saw_loss(phase.name, loss)
        return loss

    def update(self, phase: Phase, watcher: Watcher | None = None) -> None:
        """Clip the gradients that are there and let the phase's optimizers step."""
        if watcher:
            watcher.enter("optimizer", phase.name)
        optimizers = [o for o in phase.optimizers if o not in self.running.steps_in_backward]
        if self.running.guard and not self.running.guard.lets_step(phase.name, optimizers):
            return
        with interrupts_held_back():
            if phase.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters_of(phase.optimizers), phase.clip_grad_norm)
            for optimizer in optimizers:
                optimizer.step()


def device_of(step: Step) -> str:
    """Where the step's first parameter lives."""
    return next((p.device.type for model in step.models.values() for p in model.parameters()), "cpu")


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """What they train, and what they hold that is frozen."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
