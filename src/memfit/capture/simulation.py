"""Fake tensors in place of the step's real ones, for as long as a simulation runs; everything is put back afterwards."""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import Optimizer

from memfit.batches import map_tensors, tensors_in
from memfit.capture.whereabouts import is_the_users, short_path
from memfit.errors import CannotSimulate, MemfitError
from memfit.step import Step

Built = TypeVar("Built")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes but no memory. Tensors that a loss holds by itself may be real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _no_complaints() -> Iterator[None]:
    """torch logs a traceback of its own when a fake op fails; the error that follows says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def values_refused() -> Iterator[None]:
    """Turns torch's complaint about missing values into ours, which names the user's line."""
    try:
        yield
    except _NEEDS_VALUES as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_the_users(f.filename)]
        source = f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else "it"
        raise CannotSimulate(str(error.func), source) from error


@contextmanager
def simulated(step: Step) -> Iterator[Step]:
    """The step on fake tensors: the same modules and optimizers, whose tensors are exchanged until the block ends."""
    mode = _mode_of(step) or fake_mode()
    faked: dict[int, torch.Tensor] = {}
    numbers = _numbers_in_optimizers(step)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in faked:
            faked[id(tensor)] = _fake(mode, tensor, numbers.get(id(tensor)))
        return faked[id(tensor)]

    with ExitStack() as undo, mode, values_refused(), _no_complaints():
        for model in step.models.values():
            _exchange_module_tensors(model, fake, undo)
        for optimizer in step.optimizers:
            _exchange_optimizer_tensors(optimizer, fake, undo)
        yield replace(step, batch=map_tensors(fake, step.batch), loader=None)


def _numbers_in_optimizers(step: Step) -> dict[int, float]:
    """An optimizer reads its count of steps as a number; a constant made under the mode still knows its value."""
    states = [t for o in step.optimizers for state in o.state.values() for _, t in tensors_in(dict(state))]
    return {id(t): t.item() for t in states if t.dim() == 0 and not isinstance(t, FakeTensor) and t.device.type != "meta"}


def _mode_of(step: Step) -> FakeTensorMode | None:
    """The mode the step was built under, if it was: fake tensors of two modes do not mix."""
    tensors = [p for model in step.models.values() for p in model.parameters()] + [t for _, t in tensors_in(step.batch)]
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, value: float | None) -> torch.Tensor:
    if value is not None:
        with mode:
            return torch.tensor(value, dtype=tensor.dtype)
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _exchange_module_tensors(model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor], undo: ExitStack) -> None:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    undo.callback(held.__setitem__, name, tensor)  # type: ignore[arg-type]
                    held[name] = fake(tensor)  # type: ignore[assignment]


def _exchange_optimizer_tensors(optimizer: Optimizer, fake: Callable[[torch.Tensor], torch.Tensor], undo: ExitStack) -> None:
    undo.callback(setattr, optimizer, "state", optimizer.state)
    undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
    optimizer.state = defaultdict(dict, {fake(p): map_tensors(fake, dict(s)) for p, s in optimizer.state.items()})
    optimizer.param_groups = [{**group, "params": [fake(p) for p in group["params"]]} for group in optimizer.param_groups]


def built_without_memory(build: Callable[[], Built]) -> Built:
    """What a factory makes, without memory for it; one that cannot do without values while it builds is built for real."""
    try:
        with fake_mode(), _no_complaints():
            return build()
    except MemfitError:
        raise
    except Exception:
        return build()  # if the fault is the user's own, it shows again
