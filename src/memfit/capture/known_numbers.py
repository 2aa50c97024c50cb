"""Numbers that a program writes into a tensor and reads back at once, as losses list dimensions: a simulation knows them, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SHORT = 32


class KnownNumbers(TorchFunctionMode):
    """While it is entered, `torch.arange(2, 5).tolist()` gives its numbers, also where tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and (number := self._numbers_of(args[0])) is not None:
            return number
        out = func(*args, **(kwargs or {}))
        if func is torch.arange and all(isinstance(arg, int) and abs(arg) <= _SHORT for arg in args) and not out.is_floating_point():
            self._remember(out, list(range(*args)))
        elif func is torch.Tensor.unbind and (numbers := self._numbers_of(args[0])) is not None:
            for entry, number in zip(out, numbers, strict=True):
                self._remember(entry, number)
        return out

    def _remember(self, tensor: torch.Tensor, numbers: Any) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), numbers

    def _numbers_of(self, tensor: Any) -> Any:
        found, numbers = self._known.get(id(tensor), (None, None))
        return numbers if found is not None and found() is tensor else None
