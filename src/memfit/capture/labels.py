"""Tells a recorder what the step's own tensors are: parameters, gradients, optimizer states, the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from memfit.capture.recorder import Recorder
from memfit.step import Step
from memfit.step.batches import tensors_in


@contextmanager
def labelled(recorder: Recorder, step: Step) -> Iterator[None]:
    """Names what exists before the step, gradients as they appear, new buffers and the optimizer's states after it."""
    name_fixed_parts(recorder, step)
    name_optimizer_states(recorder, step)
    with ExitStack() as hooks:
        for parameter, name in _trained(step).items():
            hooks.callback(parameter.register_post_accumulate_grad_hook(_names_gradient(recorder, name)).remove)
        yield
    name_buffers(recorder, step)  # forward may have put new ones in their places
    name_optimizer_states(recorder, step)


def _trained(step: Step) -> dict[torch.Tensor, str]:
    """By the first name of each, as it is watched under."""
    found: dict[torch.Tensor, str] = {}
    for prefix, model in step.models.items():
        for name, parameter in model.named_parameters(prefix):
            if parameter.requires_grad:
                found.setdefault(parameter, name)
    return found


def _names_gradient(recorder: Recorder, name: str) -> Callable[[torch.Tensor], None]:
    def names(parameter: torch.Tensor) -> None:
        recorder.gradient_came(parameter)
        if parameter.grad is not None:
            recorder.watch(parameter.grad, "gradients", name)

    return names


def name_fixed_parts(recorder: Recorder, step: Step) -> None:
    """Parameters, buffers and the batch."""
    for prefix, model in step.models.items():
        for name, parameter in model.named_parameters(prefix):
            recorder.watch(parameter, "parameters", name)
    name_buffers(recorder, step)
    for path, tensor in tensors_in(step.batch):
        recorder.watch(tensor, "batch", path)


def name_buffers(recorder: Recorder, step: Step) -> None:
    """What the models hold beside parameters."""
    for prefix, model in step.models.items():
        for name, buffer in model.named_buffers(prefix):
            recorder.watch(buffer, "other", name)


def name_optimizer_states(recorder: Recorder, step: Step) -> None:
    """What the optimizers keep from step to step."""
    for optimizer in step.optimizers:
        for state in optimizer.state.values():
            for path, tensor in tensors_in(dict(state), type(optimizer).__name__):
                recorder.watch(tensor, "optimizer", path)
