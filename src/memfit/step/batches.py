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


def tensor_facts(batch: Any) -> dict[str, str]:
    """What each tensor of a nested batch is, wherever it is.

    >>> tensor_facts({"x": torch.zeros(2, 3)})
    {"batch['x']": 'float32 [2, 3]'}
    """
    return {path: tensor_fact(tensor) for path, tensor in tensors_in(batch)}


def tensor_fact(tensor: torch.Tensor) -> str:
    """Its type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any, otherwise: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same nest with each tensor changed; anything else in it stays, or becomes what `otherwise` makes of it.

    >>> map_tensors(lambda t: t + 1, (torch.tensor(1), "name"))
    (tensor(2), 'name')
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return with_each(lambda value, _: map_tensors(change, value, otherwise), batch, "") if _is_nest(batch) else otherwise(batch)


def with_each(change: Callable[[Any, str], Any], batch: Any, path: str) -> Any:
    """A nest with each of its values changed, given with the words that lead to it; anything else as it is."""
    if isinstance(batch, Mapping):
        changed = {key: change(value, f"{path}[{key!r}]") for key, value in batch.items()}
        return changed if type(batch) is dict else _like(batch, changed)
    if not isinstance(batch, (list, tuple)):
        return batch
    values = (change(value, f"{path}[{position}]") for position, value in enumerate(batch))
    return type(batch)(values) if is_plain_list(batch) else type(batch)(*values)


def is_plain_list(batch: Any) -> bool:
    """Fields with names belong to one thing, not to one sample each."""
    return isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")


def is_list_of_dicts(batch: Any) -> bool:
    """Of the same keys, as one for each sample: a pair of inputs and targets has others."""
    return is_plain_list(batch) and bool(batch) and all(isinstance(entry, Mapping) and entry.keys() == batch[0].keys() for entry in batch)


def _is_nest(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list, tuple))


def _like(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping that takes a dict (OrderedDict, a tokenizer's output) is made again; others become plain dicts."""
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def batch_size(batch: Any) -> int:
    """The number of samples: the length of the batch's first tensor that has one and is not in a list of dicts, as detection's targets are.

    Where all tensors are in such lists, the first list's entries are the samples, unless their tensors all have one length.

    >>> batch_size({"x": torch.zeros(4, 2), "step": torch.tensor(7)})
    4
    >>> batch_size([{"image": torch.zeros(3, 9, 9), "boxes": torch.zeros(boxes, 4)} for boxes in (2, 5)])
    2
    """
    listed: list[Any] = []
    first = next((t.shape[0] for t in _outside_lists_of_dicts(batch, listed) if t.dim() > 0), None)
    if first is not None or not listed:
        return first or 0
    lengths = {t.shape[0] for _, t in tensors_in(listed[0]) if t.dim() > 0}
    return lengths.pop() if len(lengths) == 1 else len(listed[0])


def _outside_lists_of_dicts(batch: Any, listed: list[Any]) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif is_list_of_dicts(batch):
        listed.append(batch)
    elif _is_nest(batch):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _outside_lists_of_dicts(value, listed)
