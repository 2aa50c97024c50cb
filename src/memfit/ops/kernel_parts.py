"""Loops inside memfit's own kernels: real tensors go through every part, simulated ones through the first, which stands for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from memfit.torch_private import FakeTensor

T = TypeVar("T")
_running = threading.local()


@contextmanager
def in_parts(parts: Sequence[T], like: torch.Tensor) -> Iterator[Sequence[T]]:
    """The parts to go through, the largest first. Operators inside belong to the kernel: no table of saved tensors counts them.

    >>> with in_parts([1, 2, 3], torch.ones(1)) as chosen:
    ...     print(chosen, parts_now())
    [1, 2, 3] 1
    >>> parts_now()
    0
    """
    simulated = isinstance(like, FakeTensor)
    before, _running.parts = parts_now(), len(parts) if simulated else 1
    try:
        yield parts[:1] if simulated else parts
    finally:
        _running.parts = before


def parts_now() -> int:
    """How many times an operator that is called now would run for real; 0 outside of kernels."""
    found: int = getattr(_running, "parts", 0)
    return found
