"""What in a nested batch belongs to one sample each: rows of tensors, entries of lists and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from memfit.errors import MemfitError
from memfit.step.batches import is_list_of_dicts, is_plain_list, tensors_in, with_each

Places = Mapping[str, bool]
"""By the words that lead to it: whether a tensor, list or array has something for each sample."""


def map_samples(
    rows: Callable[[torch.Tensor], torch.Tensor], entries: Callable[[Any], Any], batch: Any, total: int, places: Places | None = None
) -> Any:
    """The same nest with `rows` of each tensor that has one for each of `total` samples, and `entries` of each such list or array.

    >>> map_samples(lambda t: t[:1], lambda names: names[:1], {"x": torch.tensor([1, 2]), "names": ["a", "b"], "size": [3, 4, 5]}, 2)
    {'x': tensor([1]), 'names': ['a'], 'size': [3, 4, 5]}
    """

    def changed(value: Any, path: str) -> Any:
        if not _has_one_each(value, path, total, places or {}):
            return with_each(changed, value, path)
        return rows(value) if isinstance(value, torch.Tensor) else entries(value)

    return changed(batch, "batch")


def row_tensors(batch: Any, total: int, places: Places | None = None) -> list[torch.Tensor]:
    """The tensors of a nest that have a row for each of `total` samples; those inside a list's entries belong to the entry.

    >>> [tuple(t.shape) for t in row_tensors([torch.zeros(2, 3), [{"boxes": torch.zeros(2)}, {"boxes": torch.zeros(1)}]], 2)]
    [(2, 3)]
    """
    found: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_samples(noted, lambda entries: entries, batch, total, places)
    return found


def has_samples_of_their_own_size(batch: Any, total: int, places: Places | None = None) -> bool:
    """Whether a list holds tensors for each sample: then one part of the batch may be far larger than the others.

    >>> has_samples_of_their_own_size([torch.zeros(2, 3), [{"boxes": torch.zeros(9)}, {"boxes": torch.zeros(1)}]], 2)
    True
    """
    found: list[Any] = []

    def noted(entries: Any) -> Any:
        found.extend(tensors_in(entries))
        return entries

    map_samples(lambda t: t, noted, batch, total, places)
    return bool(found)


def sample_places(batch: Any, total: int) -> dict[str, bool]:
    """What a batch shows about every batch like it. Without that, ten classes' weights would look like samples in a last batch of ten.

    >>> sample_places({"x": torch.zeros(4, 2), "weights": torch.ones(10)}, 4)
    {"batch['x']": True, "batch['weights']": False}
    """
    found: dict[str, bool] = {}

    def look(value: Any, path: str) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)) or is_plain_list(value):
            found[path] = _looks_like_samples(value, total)
        return value if found.get(path) else with_each(look, value, path)

    look(batch, "batch")
    return found


def _has_one_each(value: Any, path: str, total: int, places: Places) -> bool:
    if path not in places:
        return _looks_like_samples(value, total)
    if places[path] and _length(value) != total:
        raise MemfitError(
            f"{path} had one entry for each sample in the step's batch, and has {_length(value)} for {total} samples now, so this batch "
            "cannot be divided. Give the step a batch in which only what belongs to the samples has their number, or leave out microbatch."
        )
    return places[path]


def _looks_like_samples(value: Any, total: int) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _length(value) == total
    return is_plain_list(value) and len(value) == total and (next(tensors_in(value), None) is None or _is_one_dict_each(value, total))


def _is_one_dict_each(entries: Any, total: int) -> bool:
    """As detection has its targets; dicts whose tensors all have a row for each sample are views of the whole batch."""
    lengths = {tensor.shape[0] for _, tensor in tensors_in(entries) if tensor.dim()}
    return is_list_of_dicts(entries) and lengths != {total}


def _length(value: Any) -> int:
    """Of the first dimension; 0 where there is none."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else 0
    return len(value) if is_plain_list(value) else 0
