"""Batches for a proof: other ones for each step of a trajectory, and smaller ones where the whole does not fit."""

from __future__ import annotations

from typing import Any

from memfit.batches import batch_size, map_tensors


def rolled(batch: Any, by: int) -> Any:
    """The same samples in another order: what a step keeps from the one before does not belong to them.

    >>> import torch
    >>> rolled({"x": torch.tensor([1, 2, 3]), "scale": torch.tensor(7)}, 1)
    {'x': tensor([3, 1, 2]), 'scale': tensor(7)}
    """
    size = batch_size(batch)
    return map_tensors(lambda t: t.roll(by, 0) if by and t.dim() and len(t) == size else t, batch)


def first_samples(batch: Any, count: int) -> Any:
    """The first few samples of a batch; tensors that are not one row a sample stay whole.

    >>> import torch
    >>> first_samples((torch.tensor([1, 2, 3]), torch.zeros(2)), 2)
    (tensor([1, 2]), tensor([0., 0.]))
    """
    size = batch_size(batch)
    return map_tensors(lambda t: t[:count] if t.dim() and len(t) == size else t, batch)
