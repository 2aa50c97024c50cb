"""Fake tensors in place of the step's real ones, for as long as a simulation runs; everything is put back afterwards."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.capture.caches import no_fakes_cached
from memfit.capture.known_numbers import KnownNumbers
from memfit.capture.whereabouts import is_the_users, short_path
from memfit.errors import CannotSimulate, MemfitError
from memfit.ops.leaves import leaves_of
from memfit.restoring import attributes_restored, containers_of, outer_gradients_restored, random_numbers_restored
from memfit.step import Step
from memfit.step.batches import map_tensors, tensors_in
from memfit.step.running import WholeExit
from memfit.torch_private import NEEDS_VALUES, FakeTensor, FakeTensorMode

Built = TypeVar("Built")


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes but no memory. Tensors that a loss holds by itself may be real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _no_complaints() -> Iterator[None]:
    """torch logs a traceback of its own when a fake op fails; the error that follows says it better. Models may copy layers."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = before


@contextmanager
def values_refused() -> Iterator[None]:
    """Turns torch's complaint about missing values into ours, which names the user's line."""
    try:
        yield
    except NEEDS_VALUES as error:
        raise CannotSimulate(str(error.func), _users_line(error)) from error
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if not _is_about_fake_tensors(error):
            raise
        raise CannotSimulate(str(error).splitlines()[0], _users_line(error)) from error


def _users_line(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_the_users(f.filename)]
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else "it"


def _is_about_fake_tensors(error: Exception) -> bool:
    """torch says so. Any other error may be the user's own, and stays as it is."""
    return any(word in str(error) for word in ("FakeTensor", "tensor subclasses", "allow_non_fake_inputs", "fake impl", "Couldn't swap"))


@contextmanager
def _as_before(step: Step) -> Iterator[None]:
    """What a step changes beside the tensors that stand in for its own."""
    with no_fakes_cached(), random_numbers_restored(), attributes_restored(step):
        yield


@contextmanager
def simulated(step: Step) -> Iterator[Step]:
    """The step on fake tensors: the same modules and optimizers, whose tensors are exchanged until the block ends."""
    mode = _mode_of(step) or fake_mode()
    faked: dict[int, torch.Tensor] = {}
    numbers = _numbers_in_optimizers(step)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
            return tensor
        if id(tensor) not in faked:
            faked[id(tensor)] = _fake(mode, tensor, numbers.get(id(tensor)))
        return faked[id(tensor)]

    refuse_parameter_hooks(step)
    with WholeExit() as around:
        around.enter_context(_as_before(step))
        undo = around.enter_context(ExitStack())
        for each in (mode, KnownNumbers(), values_refused(), _no_complaints()):
            around.enter_context(each)
        _exchange_held_tensors(step, fake)
        for optimizer in step.optimizers:
            _exchange_optimizer_tensors(optimizer, fake, undo)
        undo.enter_context(_exchanged_ones_refused(step, faked))
        undo.enter_context(outer_gradients_restored(step))
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
    copied = isinstance(tensor, FakeTensor)  # with a copy of the mode it was made under, by a model that copies its layers
    if tensor.device.type != "meta" and not copied:
        return mode.from_tensor(tensor)
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _exchange_held_tensors(step: Step, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Parameters, buffers, states, and tensors in plain attributes, alone or in containers: in place, since modules may share one."""
    for held in containers_of(step):
        places = list(held.items()) if isinstance(held, dict) else list(enumerate(held)) if isinstance(held, (list, deque)) else []
        for place, value in places:
            if isinstance(value, torch.Tensor) or type(value) is tuple:
                held[place] = _exchanged(value, fake)


def _exchanged(value: Any, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor, or a tuple of them; what is in a tuple and can be changed in place is so by itself."""
    if isinstance(value, torch.Tensor):
        return fake(value)
    return tuple(_exchanged(entry, fake) for entry in value) if type(value) is tuple else value


def refuse_parameter_hooks(step: Step) -> None:
    """A hook on a real parameter does not see the fake one in its place."""
    for model in step.models.values():
        for name, p in model.named_parameters():
            if not isinstance(p, FakeTensor) and (p._backward_hooks or p._post_accumulate_grad_hooks):
                raise MemfitError(
                    f"This step cannot be simulated as it is: a hook of yours hangs on the parameter {name!r}, and would not run on the "
                    "tensor that stands in for it.\nUse the command line with --simulate, which builds the whole step without memory, "
                    "or measure it as it is: memfit.profile(step)."
                )


@contextmanager
def _exchanged_ones_refused(step: Step, exchanged: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """A loss that reaches a tensor of the step's other than through the step has a real one, with gradients that no step takes."""

    def look(loss: torch.Tensor) -> None:
        for leaf in leaves_of(loss):
            if id(leaf) in exchanged and not isinstance(leaf, FakeTensor):
                raise MemfitError(_reached_elsewhere(step, exchanged[id(leaf)]))

    step.running.saw_loss.append(look)
    try:
        yield
    finally:
        step.running.saw_loss.remove(look)


def _reached_elsewhere(step: Step, tensor: torch.Tensor) -> str:
    named = (name for prefix, model in step.models.items() for name, p in model.named_parameters(prefix) if p is tensor)
    name = next(named, None)
    which = f"the parameter {name!r}" if name else f"a tensor of the step's of shape {tuple(tensor.shape)}"
    return (
        f"This step cannot be simulated as it is: the loss uses {which} from a variable of its own, a list that was made before, say, "
        "and not from the model or batch it is called with.\nTake it from these inside the loss, as in model.parameters(). Or use the "
        "command line with --simulate, which builds the whole step without memory, or measure it as it is: memfit.profile(step)."
    )


def _exchange_optimizer_tensors(optimizer: Optimizer, fake: Callable[[torch.Tensor], torch.Tensor], undo: ExitStack) -> None:
    undo.callback(setattr, optimizer, "state", optimizer.state)
    undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
    optimizer.state = defaultdict(dict, {fake(p): map_tensors(fake, dict(s)) for p, s in optimizer.state.items()})
    optimizer.param_groups = [{**group, "params": [fake(p) for p in group["params"]]} for group in optimizer.param_groups]


def built_without_memory(build: Callable[[], Built]) -> Built:
    """What a factory makes, without memory for it; one that cannot do without values while it builds is built for real."""
    try:
        with no_fakes_cached(), fake_mode(), _no_complaints():
            return build()
    except MemfitError:
        raise
    except Exception:
        return build()  # if the fault is the user's own, it shows again
