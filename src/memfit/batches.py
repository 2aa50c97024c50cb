"""Batches as a DataLoader gives them: tensors, or nested dicts, lists and tuples of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(batch: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested batch with the words that lead to it.

    >>> [(path, tuple(t.shape)) for path, t in tensors_in({"x": torch.zeros(2, 3), "y": [torch.zeros(2)]})]
    [("batch['x']", (2, 3)), ("batch['y'][0]", (2,))]
    """
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_in(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for position, value in enumerate(batch):
            yield from tensors_in(value, f"{path}[{position}]")


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any, otherwise: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same nest with each tensor changed; anything else in it stays, or becomes what `otherwise` makes of it.

    >>> map_tensors(lambda t: t + 1, (torch.tensor(1), "name"))
    (tensor(2), 'name')
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return _with_each(lambda value: map_tensors(change, value, otherwise), batch) if _is_nest(batch) else otherwise(batch)


def map_samples(rows: Callable[[torch.Tensor], torch.Tensor], entries: Callable[[Any], Any], batch: Any, total: int) -> Any:
    """The same nest with `rows` of each tensor that has one for each of `total` samples, and `entries` of each list of other values.

    >>> map_samples(lambda t: t[:1], lambda names: names[:1], {"x": torch.tensor([1, 2]), "names": ["a", "b"], "size": [3, 4, 5]}, 2)
    {'x': tensor([1]), 'names': ['a'], 'size': [3, 4, 5]}
    """
    if isinstance(batch, torch.Tensor):
        return rows(batch) if batch.dim() and batch.shape[0] == total else batch
    if _is_plain_list(batch) and len(batch) == total and next(tensors_in(batch), None) is None:
        return entries(batch)
    return _with_each(lambda value: map_samples(rows, entries, value, total), batch)


def _is_nest(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list, tuple))


def _is_plain_list(batch: Any) -> bool:
    """Fields with names belong to one thing, not to one sample each."""
    return isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")


def _with_each(change: Callable[[Any], Any], batch: Any) -> Any:
    """A nest with each of its values changed; anything else as it is."""
    if isinstance(batch, Mapping):
        changed = {key: change(value) for key, value in batch.items()}
        return changed if type(batch) is dict else _like(batch, changed)
    if _is_plain_list(batch):
        return type(batch)(change(value) for value in batch)
    return type(batch)(*map(change, batch)) if isinstance(batch, tuple) else batch


def _like(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping that takes a dict (OrderedDict, a tokenizer's output) is made again; others become plain dicts."""
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def batch_size(batch: Any) -> int:
    """The number of samples: the length of the batch's first tensor that has one.

    >>> batch_size({"x": torch.zeros(4, 2), "step": torch.tensor(7)})
    4
    """
    return next((t.shape[0] for _, t in tensors_in(batch) if t.dim() > 0), 0)
