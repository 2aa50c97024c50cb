"""Whatever a captured step changes is put back: parameters, buffers, optimizer state, gradients, random numbers, the user's batch.

The bits wait in a file, not in memory, so that looking at a step that barely fits does not tip it over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from memfit.errors import StepError
from memfit.kept_bits import bits_restored
from memfit.restoring import attributes_restored, held_tensors, outer_gradients_restored, random_numbers_restored
from memfit.step import Step
from memfit.step.batches import tensors_in
from memfit.step.faults import value_faults
from memfit.step.running import WholeExit


@contextmanager
def rolled_back(step: Step) -> Iterator[None]:
    """Run steps inside; afterwards the step is as it was, bit for bit, also after an exception or Ctrl-C."""
    if faults := value_faults(step):
        raise StepError(faults)
    with WholeExit() as undo:
        undo.enter_context(random_numbers_restored())
        undo.enter_context(attributes_restored(step))
        undo.enter_context(bits_restored(_storages(step)))
        undo.enter_context(outer_gradients_restored(step))
        undo.callback(_put_back_parameters, [(p, p.data, p.requires_grad, p.grad) for p in _parameters(step)])
        for p in _parameters(step):
            p.grad = None
        yield


def _parameters(step: Step) -> list[torch.Tensor]:
    return [p for model in step.models.values() for p in model.parameters()]


def _put_back_parameters(before: Iterable[tuple[torch.Tensor, torch.Tensor, bool, torch.Tensor | None]]) -> None:
    for p, data, trained, gradient in before:
        p.data, p.requires_grad = data, trained
        p.grad = gradient


def _storages(step: Step) -> list[torch.UntypedStorage]:
    held = [t for t in held_tensors(step) if t.layout is torch.strided and t.device.type != "meta"]
    return [t.untyped_storage() for t in (*held, *(t for _, t in tensors_in(step.batch)))]
