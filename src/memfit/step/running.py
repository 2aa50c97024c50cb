"""How a fitted step runs: what levers put around and between the calls of the plain step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from memfit.errors import MemfitError
from memfit.records import Process, Trace
from memfit.step.samples import Places


@dataclass(frozen=True)
class Part:
    """A piece of a batch whose loss is taken on its own; `share` is what it counts for, all shares of a batch sum to 1."""

    batch: Any
    share: float = 1.0
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around this part's loss and backward
    around_loss: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around its loss only, before `Running.around_loss`


class Guard(Protocol):
    """Stands between gradients and optimizer: scales losses, and says whether a step may be taken."""

    def begins(self, phase: str, number: int, batch: Any, carry: dict[str, Any]) -> None:
        """Before the loss of each part of a batch is computed; parts are counted from 0."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward is called on."""

    def lets_step(self, phase: str, optimizers: Sequence[Optimizer]) -> bool:
        """After all gradients of a phase are there: bring them back to scale; False skips this step."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, in plain numbers: a training that is resumed goes on with it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what another had learned."""
        return


@dataclass
class Running:
    """Empty: the plain step. A lever's `apply` adds to it, its undo takes the same thing out again."""

    around_loss: list[Callable[[str], AbstractContextManager[Any]]] = field(default_factory=list)  # called with the phase's name
    split: Callable[[str, Any], Iterable[Part]] | None = None  # phase and batch to parts, the same number for every phase
    guard: Guard | None = None
    steps_in_backward: list[Optimizer] = field(default_factory=list)  # their step happens as gradients come
    before_update: list[Callable[[torch.Tensor], object]] = field(default_factory=list)  # of a parameter, inside backward: called with it
    after_step: list[Callable[[], object]] = field(default_factory=list)  # called when a step is done, or its backward in one's own loop
    saw_loss: list[Callable[[torch.Tensor], object]] = field(default_factory=list, compare=False)  # no lever's: given each loss
    places: Places | None = field(default=None, compare=False)  # no lever's: what belonged to samples in the batch the step was made with
    loader_batches: float = field(default=1.0, compare=False)  # no lever's: times the loader's own size, on a batch that stands for others
    levers_on: list[str] | None = None  # those of the plan that is on: some leave no other trace here; None: no plan is on
    simulated_on: str | None = field(default=None, compare=False)  # no lever's: the device that a simulation stands for, while it runs
    beside: Callable[[Trace, Process], Process] | None = None  # what is predicted beside the tensors, where a lever sees to it

    def parts(self, phase: str, batch: Any) -> list[Part]:
        """The parts of a batch, one after the other."""
        return [Part(batch)] if self.split is None else list(self.split(phase, batch))

    def stepping_in_backward(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Those of a phase's optimizers whose step happens as gradients come."""
        found = [o for o in optimizers if o in self.steps_in_backward]
        if found and (self.split is not None or self.guard is not None):
            raise MemfitError(
                "An optimizer of this step takes its step inside backward, where gradients of several micro-batches cannot be summed "
                "nor scaled ones checked first: take that lever off, or micro-batches and loss scaling."
            )
        return found

    @contextmanager
    def surroundings(self, phase: str) -> Iterator[None]:
        """What levers put around the call of a loss."""
        with ExitStack() as entered:
            for make in self.around_loss:
                entered.enter_context(make(phase))
            yield


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits until the block is done: half an optimizer step would leave weights that belong to no step."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(held[0])


class WholeExit(ExitStack):
    """An ExitStack that is left as a whole: Ctrl-C waits until the last of what it holds is put back."""

    def __exit__(self, *error: Any) -> bool:
        """Leave everything that was entered, last first."""
        with interrupts_held_back():
            return bool(super().__exit__(*error))
