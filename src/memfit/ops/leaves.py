"""What a loss depends on: the ends of its autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def leaves_of(loss: torch.Tensor, through: Sequence[torch.Tensor] = ()) -> Iterator[torch.Tensor]:
    """Every trained leaf that `loss` depends on other than through tensors that were computed before.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    >>> [leaf is b for leaf in leaves_of(b.exp().sum())]
    [True]
    """
    seen: set[Any] = {tensor.grad_fn for tensor in through if tensor.grad_fn is not None}
    waiting = [loss.grad_fn] if loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        waiting.extend(following for following, _ in node.next_functions if following is not None)


def unlisted_leaf(loss: torch.Tensor, listed: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A trained leaf that `loss` depends on other than through the listed tensors; None when there is none.

    >>> a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    >>> unlisted_leaf((a.sum() * b.sum()), [a]) is b
    True
    """
    ours = {id(tensor) for tensor in listed}
    return next((leaf for leaf in leaves_of(loss, listed) if id(leaf) not in ours), None)
