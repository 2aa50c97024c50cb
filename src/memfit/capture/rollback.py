"""Whatever a captured step changes is put back: parameters, buffers, optimizer state, gradients, random numbers, the user's batch.

The bits wait in a file, not in memory, so that looking at a step that barely fits does not tip it over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from memfit.batches import tensors_in
from memfit.disk_file import file_on_a_disk
from memfit.errors import StepError
from memfit.restoring import attributes_restored, held_tensors, random_numbers_restored
from memfit.step import Step
from memfit.step_faults import value_faults


@contextmanager
def rolled_back(step: Step) -> Iterator[None]:
    """Run steps inside; afterwards the step is as it was, bit for bit, also after an exception."""
    if faults := value_faults(step):
        raise StepError(faults)
    optimizers = [(o, {p: copy.copy(s) for p, s in o.state.items()}, [dict(g) for g in o.param_groups]) for o in step.optimizers]
    parameters = [p for model in step.models.values() for p in model.parameters()]
    before = [(p, p.data, p.requires_grad, p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
    storages = _storages(step)
    with random_numbers_restored(), attributes_restored(step), file_on_a_disk() as kept:
        for storage in storages:
            _write(storage, kept)
        try:
            yield
        finally:
            for optimizer, state, groups in optimizers:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(values)
            for p, data, trained, gradient in before:
                p.data, p.requires_grad = data, trained
                p.grad = gradient
            kept.seek(0)
            for storage in storages:
                _read(storage, kept)


def _storages(step: Step) -> list[torch.UntypedStorage]:
    tensors: list[Any] = [t for t in held_tensors(step) if t.layout is torch.strided and t.device.type != "meta"]
    tensors += [t for o in step.optimizers for state in o.state.values() for _, t in tensors_in(dict(state))]
    tensors += [t for o in step.optimizers for group in o.param_groups for t in group.values() if isinstance(t, torch.Tensor)]
    tensors += [t for _, t in tensors_in(step.batch)]
    return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _write(storage: torch.UntypedStorage, file: IO[bytes]) -> None:
    with torch.no_grad():
        file.write(_bytes_of(storage).cpu().numpy().data)


def _read(storage: torch.UntypedStorage, file: IO[bytes]) -> None:
    with torch.no_grad():
        target = _bytes_of(storage)
        if storage.device.type == "cpu":
            file.readinto(target.numpy().data)  # type: ignore[attr-defined]
        else:
            target.copy_(torch.frombuffer(bytearray(file.read(storage.nbytes())), dtype=torch.uint8))
