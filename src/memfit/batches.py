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
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(change, value, otherwise) for key, value in batch.items()}
        return changed if type(batch) is dict else _like(batch, changed)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value, otherwise) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(change, value, otherwise) for value in batch)
    return otherwise(batch)


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
