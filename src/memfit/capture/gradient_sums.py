"""Gradients that autograd adds up: in place where it holds the only reference to the first, except while a dispatch mode is watching.

A recorder is such a mode, so what it sees is a new tensor for each sum, which the plain step never makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from memfit.torch_private import TorchDispatchMode, references, without_modes

aten = torch.ops.aten


def is_summed_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether autograd, unwatched, would add to the first gradient itself. Asked while backward runs.

    That the first was not made by the node that runs is for the caller to see: formulas of nodes add, too.
    """
    if func is not aten.add.Tensor or torch.is_grad_enabled() or (lone := lone_gradient()) is None or references(args) != lone:
        return False
    first, second = args
    return isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype and _is_dense(first)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Neither gaps nor overlaps between the numbers, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@cache
def lone_gradient() -> tuple[int, int, int] | None:
    """What `references` says of a gradient that only autograd holds, seen on two that it adds up; None where torch does not tell."""
    with without_modes() or nullcontext(), torch.enable_grad():
        start = torch.ones(2, requires_grad=True) * 1
        end = (start.exp() + start.sin()).sum()
        looking = _Looking()  # type: ignore[no-untyped-call]
        with looking:
            end.backward()
    seen: tuple[int, int, int] | None = looking.seen
    return seen


class _Looking(TorchDispatchMode):
    seen: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor:
            self.seen = references(args)
        return func(*args, **(kwargs or {}))
