"""Whatever a captured step changes is put back: parameters, buffers, optimizer state, gradients, random numbers, the user's batch.

The bits wait in a file, not in memory, so that looking at a step that barely fits does not tip it over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.batches import tensors_in
from memfit.errors import StepError
from memfit.kept_bits import bits_restored
from memfit.restoring import attributes_restored, held_tensors, outer_gradients_restored, random_numbers_restored
from memfit.running import interrupts_held_back
from memfit.step import Step
from memfit.step_faults import value_faults


@contextmanager
def rolled_back(step: Step) -> Iterator[None]:
    """Run steps inside; afterwards the step is as it was, bit for bit, also after an exception or Ctrl-C."""
    if faults := value_faults(step):
        raise StepError(faults)
    with ExitStack() as undo:
        undo.enter_context(random_numbers_restored())
        undo.enter_context(attributes_restored(step))
        undo.enter_context(bits_restored(_storages(step)))
        undo.enter_context(outer_gradients_restored(step))
        undo.callback(_put_back_parameters, [(p, p.data, p.requires_grad, p.grad) for p in _parameters(step)])
        undo.callback(
            _put_back_optimizers,
            [(o, {p: copy.copy(s) for p, s in o.state.items()}, [dict(g) for g in o.param_groups]) for o in step.optimizers],
        )
        try:
            for p in _parameters(step):
                p.grad = None
            yield
        finally:
            with interrupts_held_back():
                undo.close()


def _parameters(step: Step) -> list[torch.Tensor]:
    return [p for model in step.models.values() for p in model.parameters()]


def _put_back_parameters(before: Iterable[tuple[torch.Tensor, torch.Tensor, bool, torch.Tensor | None]]) -> None:
    for p, data, trained, gradient in before:
        p.data, p.requires_grad = data, trained
        p.grad = gradient


def _put_back_optimizers(before: Iterable[tuple[Optimizer, dict[Any, Any], list[dict[str, Any]]]]) -> None:
    for optimizer, state, groups in before:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def _storages(step: Step) -> list[torch.UntypedStorage]:
    tensors: list[Any] = [t for t in held_tensors(step) if t.layout is torch.strided and t.device.type != "meta"]
    tensors += [t for o in step.optimizers for state in o.state.values() for _, t in tensors_in(dict(state))]
    tensors += [t for o in step.optimizers for group in o.param_groups for t in group.values() if isinstance(t, torch.Tensor)]
    tensors += [t for _, t in tensors_in(step.batch)]
    return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())
