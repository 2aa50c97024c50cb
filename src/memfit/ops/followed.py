"""Which operator calls autograd follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_followed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a gradient may flow back through a call: masks, positions and statistics are made without.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> is_followed((weight, 2), {}), is_followed((torch.ones(2), 2), {})
    (True, False)
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors((args, *kwargs.values())))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)
