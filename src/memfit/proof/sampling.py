"""Batches for a proof: other ones for each step of a trajectory, and smaller ones where the whole does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.step.batches import batch_size, map_tensors
from memfit.step.parts import sliced
from memfit.step.samples import Places, map_samples


@dataclass(frozen=True)
class Batches:
    """The batches of a few steps, each made when it is asked for: a large one is in memory twice at most."""

    batch: Any
    count: int
    in_one_order: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.batch if self.in_one_order else varied(self.batch, number)


def varied(batch: Any, number: int) -> Any:
    """The same samples in another order, a single one mirrored: what a step keeps from the one before does not belong to them.

    >>> import torch
    >>> varied({"x": torch.tensor([1, 2, 3]), "scale": torch.tensor(7)}, 1), varied(torch.tensor([[1.0, 2.0]]), 1)
    ({'x': tensor([3, 1, 2]), 'scale': tensor(7)}, tensor([[2., 1.]]))
    >>> varied([torch.tensor([1, 2, 3]), ["a", "b", "c"], torch.tensor([7, 8])], 1)
    [tensor([3, 1, 2]), ['c', 'a', 'b'], tensor([7, 8])]
    """
    if batch_size(batch) > 1:
        return map_samples(lambda t: t.roll(number, 0) if number else t, lambda entries: _rolled(entries, number), batch, batch_size(batch))
    return map_tensors(lambda t: t.flip(-1) if number % 2 and t.dim() > 1 and t.is_floating_point() else t, batch)


def _rolled(entries: Any, number: int) -> Any:
    if isinstance(entries, np.ndarray):
        return np.roll(entries, number, 0)
    first = -number % len(entries)
    return entries[first:] + entries[:first]


def first_samples(batch: Any, count: int, places: Places | None = None) -> Any:
    """The first few samples of a batch.

    >>> import torch
    >>> first_samples((torch.tensor([1, 2, 3]), torch.tensor(7)), 2)
    (tensor([1, 2]), tensor(7))
    """
    return sliced(batch, batch_size(batch), 0, count, places)
