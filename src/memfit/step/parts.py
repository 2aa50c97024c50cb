"""A batch in parts: slices of nested batches, and what each part counts for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memfit.errors import MemfitError
from memfit.step.batches import tensors_in
from memfit.step.samples import Places, map_samples
from memfit.torch_private import FakeTensor


def lengths(total: int, size: int) -> list[int]:
    """How many samples each part has; the last one may have fewer.

    >>> lengths(5, 2)
    [2, 2, 1]
    """
    return [min(size, total - start) for start in range(0, total, size)]


def sliced(batch: Any, total: int, start: int, length: int, places: Places | None = None) -> Any:
    """A part of a nested batch: views of tensors with a row for each sample, entries of lists with one for each; the rest is shared by all.

    >>> import torch
    >>> sliced({"x": torch.arange(4), "t": torch.tensor(7), "names": ["a", "b", "c", "d"]}, 4, 1, 2)
    {'x': tensor([1, 2]), 't': tensor(7), 'names': ['b', 'c']}
    """
    return map_samples(lambda t: t.narrow(0, start, length), lambda entries: entries[start : start + length], batch, total, places)


def is_simulated(batch: Any) -> bool:
    """A simulation knows no values, and memory does not depend on them."""
    return any(isinstance(t, FakeTensor) for _, t in tensors_in(batch))


def checked_weight(whose: str, weight: Any) -> float:
    """What a user's function said a part counts for."""
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise MemfitError(f"{whose} gave {number} for a part of the batch: give what its mean is taken over, a number from 0 up.")
    return number


def shares(weights: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """What each part counts for, in all 1; where nothing counts, samples do, as the undivided batch would run.

    >>> shares([3.0, 1.0], [2, 2])
    [0.75, 0.25]
    """
    counted = weights if sum(weights) else [float(length) for length in lengths]
    return [weight / sum(counted) for weight in counted]
