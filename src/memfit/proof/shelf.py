"""Tensors that wait in a file to be compared: a proof holds one of them in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from memfit.disk_file import file_on_a_disk

_PIECE = 2**20  # values that are compared at a time, in float64


class Key(NamedTuple):
    """What a tensor is: one of gradients, later, parameters, buffers, optimizer_state, rng, end, end buffers, end rng, draws; and whose."""

    kind: str
    name: str


class _Place(NamedTuple):
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]  # of the dimensions in memory, so that a sum over the tensor goes the same way afterwards


class Shelf:
    """Tensors by key, kept in a file that goes with the object. Where kinds are given, others are not kept.

    >>> shelf = Shelf("buffers", "rng")
    >>> shelf.put(Key("buffers", "mean"), torch.ones(2, 3).t())
    >>> shelf.put(Key("gradients", "weight"), torch.ones(2))
    >>> list(shelf)
    [Key(kind='buffers', name='mean')]
    >>> shelf.get(Key("buffers", "mean")).stride()
    (1, 3)
    """

    def __init__(self, *wanted: str) -> None:
        self._wanted = wanted
        self._file = file_on_a_disk()  # open as long as the shelf lives
        self._places: dict[Key, _Place] = {}
        self._end = 0
        self._norms: dict[str, float] = {}

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Write a tensor; one that was there under the key is replaced."""
        if self._wanted and key.kind not in self._wanted:
            return
        self._norms.pop(key.kind, None)
        tensor = tensor.detach()
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()
        order = tuple(sorted(range(dense.dim()), key=dense.stride, reverse=True))
        flat = dense.permute(order).contiguous().cpu().reshape(-1)
        before = self._places.get(key)
        fits = before is not None and before.shape == dense.shape and before.dtype == dense.dtype
        offset = before.offset if before is not None and fits else self._end
        self._file.seek(offset)
        self._file.write(flat.view(torch.uint8).numpy().data)
        self._places[key] = _Place(offset, dense.shape, dense.dtype, order)
        self._end = max(self._end, offset + flat.numel() * flat.element_size())

    def get(self, key: Key) -> torch.Tensor:
        """Read a tensor, its strides as they were."""
        place = self._places[key]
        in_memory = [place.shape[d] for d in place.order]
        self._file.seek(place.offset)
        held = bytearray(self._file.read(place.shape.numel() * place.dtype.itemsize))
        # made without an op: one that runs under a mode may come out in another type
        flat = torch.frombuffer(held, dtype=place.dtype) if held else torch.empty(0, dtype=place.dtype)
        back = [place.order.index(d) for d in range(len(place.order))]
        return flat.view(in_memory).permute(back)

    def keys(self, kind: str) -> list[Key]:
        """All keys of one kind, in the order they were written."""
        return [key for key in self._places if key.kind == kind]

    def norm(self, kind: str) -> float:
        """Of all tensors of one kind together, counters left out; read once."""
        if kind not in self._norms:
            found = (self.get(key) for key in self.keys(kind) if self._places[key].dtype.is_floating_point)
            self._norms[kind] = math.hypot(*(distance(tensor) for tensor in found))
        return self._norms[kind]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[Key]:
        return iter(self._places)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit: NaNs equal themselves, and minus zero is not zero.

    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")])), same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def distance(a: torch.Tensor, b: torch.Tensor | None = None) -> float:
    """The L2 norm of a difference, in float64; of `a` itself without `b`; infinite between tensors of different shapes.

    >>> distance(torch.tensor([3.0, 4.0])), distance(torch.ones(2), torch.ones(3))
    (5.0, inf)
    """
    if b is not None and a.shape != b.shape:
        return float("inf")
    total = 0.0
    others = iter(b.reshape(-1).split(_PIECE)) if b is not None else None
    for piece in a.reshape(-1).split(_PIECE):
        wide = _wide(piece) - _wide(next(others)) if others else _wide(piece)
        total += float(wide.abs().square().sum())
    return float(total**0.5)


def _wide(piece: torch.Tensor) -> torch.Tensor:
    return piece.to(torch.complex128 if piece.is_complex() else torch.float64)
