"""The plain step in less memory: what autograd keeps of its losses waits in a file. Nothing is computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from memfit.levers.glibc import give_back_at_once
from memfit.levers.lever import CannotApply
from memfit.levers.undo import Undo
from memfit.ops.remaking import Kept
from memfit.ops.spill import Spill
from memfit.step import Step
from memfit.torch_private import detached

_SMALLEST = 1 << 16  # bytes: less is not worth the way


@contextmanager
def kept_in_file(step: Step) -> Iterator[None]:
    """Apart from any lever, so that levers can be compared with it; tensors on a device stay where they are.

    Blocks come and go in an order that the writing thread decides. In malloc's heap they would leave several times their peak in holes, so
    they are kept out of it where that can be done.

    >>> net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
    >>> step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(128, 256))
    >>> with kept_in_file(step):
    ...     step.run(step.batch)[""].shape
    torch.Size([])
    """
    spill = Spill()

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept = Kept(tensor if tensor.is_leaf else detached(tensor))
        small = tensor.untyped_storage().nbytes() < _SMALLEST
        return kept.get if small or tensor.is_leaf or tensor.device.type != "cpu" else spill.write(kept.tensor, kept.get).get

    def around(phase: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda get: get())

    step.running.around_loss.append(around)
    try:
        with Undo() as undo:
            with suppress(CannotApply):
                give_back_at_once(_SMALLEST, undo)
            yield
    finally:
        step.running.around_loss.remove(around)
        spill.close()
