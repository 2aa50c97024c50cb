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
        numbers = self._numbers_of(args[0]) if args else None
        if func is torch.Tensor.item and numbers is not None:
            return numbers
        out = func(*args, **(kwargs or {}))
        if func is torch.arange and not out.is_floating_point():
            self._remember_range(out, args, kwargs or {})
        elif func is torch.Tensor.unbind and numbers is not None:
            for entry, number in zip(out, numbers, strict=True):
                self._remember(entry, number)
        elif numbers is not None and getattr(func, "__name__", "").endswith("_"):  # written to, or we do not know
            del self._known[id(args[0])]
        return out

    def _remember_range(self, out: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        whole = args and all(isinstance(arg, int) and abs(arg) <= _SHORT for arg in args)
        if whole and not {"start", "end", "step", "out"} & kwargs.keys():
            self._remember(out, list(range(*args)))

    def _remember(self, tensor: torch.Tensor, numbers: Any) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), numbers

    def _numbers_of(self, tensor: Any) -> Any:
        found, numbers = self._known.get(id(tensor), (None, None))
        return numbers if found is not None and found() is tensor else None
