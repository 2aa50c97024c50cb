"""What an operator was called with."""

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
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of((args, *kwargs.values())))


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Those among arguments or results, in lists of them, too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)
