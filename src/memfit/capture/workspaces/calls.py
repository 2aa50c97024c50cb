"""An operator call without its tensors: enough to make it again, and to recognise it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor's layout."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """The layout of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def as_dict(self) -> dict[str, Any]:
        """The layout in values of no class of ours."""
        return {"size": self.size, "stride": self.stride, "dtype": self.dtype}

    @property
    def nbytes(self) -> int:
        """What a tensor of this layout takes."""
        return math.prod(self.size) * self.dtype.itemsize

    def resized(self, dim: int, length: int) -> Shape:
        """The same order of dimensions in memory with one of them longer or shorter."""
        size = (*self.size[:dim], length, *self.size[dim + 1 :])
        stride, step = [0] * len(size), 1
        for d in sorted(range(len(size)), key=lambda d: (self.stride[d], -d)):
            stride[d] = step if self.stride[d] else 0
            step *= size[d] if self.stride[d] else 1
        return Shape(size, tuple(stride), self.dtype)

    def make(self) -> torch.Tensor:
        """A tensor of zeros of this layout: valid as an index, and no page of it is written."""
        span = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1 if math.prod(self.size) else 0
        return torch.zeros(span, dtype=self.dtype).as_strided(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments, with a Shape in place of each tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call as a recorder saw it."""
        kept = {k: v for k, v in kwargs.items() if not isinstance(v, (torch.device, torch.Generator))}
        return cls(func, _map(args, Shape.of, torch.Tensor), _map(kept, Shape.of, torch.Tensor))

    def portable(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The call with its operator by name, for another process."""
        return str(self.func), self.args, self.kwargs

    def plain(self) -> tuple[str, Any, Any]:
        """The same with a dict in place of each Shape, for a process that knows nothing of this one's classes."""
        return str(self.func), _map(self.args, Shape.as_dict, Shape), _map(self.kwargs, Shape.as_dict, Shape)

    @classmethod
    def from_portable(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """What `portable` gave, with the operator of that name."""
        return cls(functools.reduce(getattr, name.split("."), torch.ops), args, kwargs)

    @property
    def key(self) -> str:
        """The call's signature, the same on every machine."""
        return f"{self.func}{_told(self.args)}{_told(sorted(self.kwargs.items()))}"

    def shapes(self) -> Iterator[Shape]:
        """The layouts of all tensors among the arguments."""
        yield from _shapes((self.args, tuple(self.kwargs.values())))

    @property
    def nbytes(self) -> int:
        """What the arguments take; outputs and workspace are of the same order."""
        return sum(shape.nbytes for shape in self.shapes())

    @property
    def operand_bytes(self) -> int:
        """The same without what is given by name: an attention's mask grows faster than all that the operator takes inside."""
        return sum(shape.nbytes for shape in _shapes(self.args)) or self.nbytes

    def with_shapes(self, change: Callable[[Shape], Shape]) -> Call:
        """The same call on other shapes."""
        return replace(self, args=_map(self.args, change, Shape), kwargs=_map(self.kwargs, change, Shape))

    def with_args(self, changes: dict[int, Any]) -> Call:
        """The same call with some positional arguments exchanged."""
        return replace(self, args=tuple(changes.get(i, arg) for i, arg in enumerate(self.args)))

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real arguments for it."""
        return _map(self.args, Shape.make, Shape), _map(self.kwargs, Shape.make, Shape)


def _map(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, change, kind) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, change, kind) for key, item in value.items()}
    return value


def _shapes(value: Any) -> Iterator[Shape]:
    if isinstance(value, Shape):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _shapes(item)


def _told(value: Any) -> str:
    if isinstance(value, Shape):
        dense = value.resized(0, value.size[0]).stride == value.stride if value.size else True
        order = "" if dense and list(value.stride) == sorted(value.stride, reverse=True) else f"@{list(value.stride)}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.size)}{order}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_told(item) for item in value) + ")"
    return str(value)
