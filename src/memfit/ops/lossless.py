"""Lossless packing: truth values, and values of which there are only two, to one bit each; whole numbers to fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from memfit.ops.bits import packed_away, unpacked
from memfit.torch_private import FakeTensor

Unpack = Callable[[], torch.Tensor]
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16)
_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALLER = (torch.uint8, torch.int8, torch.int16, torch.int32)


def packed(tensor: torch.Tensor) -> Unpack | None:
    """How to get the same tensor back from fewer bytes, bit for bit; None where its values do not allow it.

    >>> mask = torch.tensor([0.0, 1.25, 1.25, 0.0])
    >>> torch.equal(packed(mask)(), mask), packed(torch.tensor([0.1, 0.2, 0.3]))
    (True, None)
    """
    if not tensor.is_contiguous() or tensor.numel() < 2:
        return None
    if tensor.dtype in _WHOLE_NUMBERS:
        return _narrowed(tensor)
    if tensor.dtype == torch.bool:
        bits = _to_bits(tensor.flatten())
        return None if bits is None else _with_shape(bits, tensor, None)
    if not tensor.is_floating_point():
        return None
    low, highest = tensor.view(_AS_BITS[tensor.itemsize]).aminmax()  # of numbers that are not negative, bits have the same order
    high = highest.view(tensor.dtype)
    if not _certainly((low >= 0) & torch.isfinite(high)):  # a negative zero would come back as zero; zero times infinity is not zero
        return None
    high = high.masked_fill(high == 0, 1)
    bits = _to_bits(tensor.flatten(), high)
    return None if bits is None else _with_shape(bits, tensor, high)


def _to_bits(flat: torch.Tensor, high: torch.Tensor | None = None) -> torch.Tensor | None:
    """The flags as bits, made in eight pieces so that no step needs more than an eighth of them.

    `high` makes flags of values that are zero or high; None comes back if others are among them.
    """
    bits = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
    for start, stop in _pieces(flat.numel()):
        piece = flat[start:stop]
        flags = piece.clone() if high is None else piece == high  # packing uses them up
        if high is not None and not _are_equal(flags, piece.bool()):
            return None
        bits[start // 8 : -(-stop // 8)] = packed_away(flags)
    return bits


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    """Eighths of a flat tensor, in whole bytes of bits."""
    length = 8 * -(-count // 64)
    return ((start, min(start + length, count)) for start in range(0, count, length))


def _certainly(conditions: torch.Tensor) -> bool:
    """A simulated tensor has no values: there, what the plan says is believed."""
    return isinstance(conditions, FakeTensor) or bool(conditions.all())


def _are_equal(flags: torch.Tensor, others: torch.Tensor) -> bool:
    return isinstance(flags, FakeTensor) or torch.equal(flags, others)


def _from_bits(bits: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    flags = torch.empty(count, dtype=dtype, device=bits.device)
    for start, stop in _pieces(count):
        flags[start:stop] = unpacked(bits[start // 8 : -(-stop // 8)], (stop - start,)).view(torch.uint8)  # quicker than truth values
    return flags


def _with_shape(bits: torch.Tensor, tensor: torch.Tensor, high: torch.Tensor | None) -> Unpack:
    shape, dtype, count = tensor.shape, tensor.dtype, tensor.numel()

    def unpack() -> torch.Tensor:
        flags = _from_bits(bits, count, dtype)
        return (flags if high is None else flags.mul_(high)).view(shape)

    return unpack


def _narrowed(tensor: torch.Tensor) -> Unpack | None:
    dtype = tensor.dtype
    if isinstance(tensor, FakeTensor):
        small = tensor.to(torch.int32) if dtype == torch.int64 else tensor
        return lambda: small.to(dtype)
    low, high = (int(value) for value in torch.aminmax(tensor))
    for smaller in _SMALLER:
        if smaller.itemsize < dtype.itemsize and torch.iinfo(smaller).min <= low and high <= torch.iinfo(smaller).max:
            narrow = tensor.to(smaller)
            return lambda: narrow.to(dtype)
    return None
