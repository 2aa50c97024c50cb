"""Datasets that keep samples in memory, as MONAI's CacheDataset does: what that takes, and keeping fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch


def has_cache(dataset: Any) -> bool:
    """Whether it keeps a list of samples that may be shortened: one without a sample makes it again, the same."""
    is_list = isinstance(getattr(dataset, "_cache", None), list)
    return is_list and hasattr(dataset, "cache_num") and not getattr(dataset, "hash_as_key", True)


def cached_bytes(dataset: Any) -> int:
    """What the kept samples take.

    >>> cached_bytes([1, 2, 3])
    0
    """
    return sum(_sizes(dataset._cache)) if has_cache(dataset) else 0


def keep_fewer(dataset: Any, share: float) -> Callable[[], None]:
    """Keep this part of the samples; what comes back takes all in again, each when it is next asked for."""
    before = dataset.cache_num
    kept = int(share * before)

    def restore() -> None:
        dataset._cache = dataset._cache + [None] * (before - kept)
        dataset.cache_num = before

    dataset.cache_num, dataset._cache = kept, dataset._cache[:kept]
    return restore


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        yield value.nbytes
    elif isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _sizes(part)
