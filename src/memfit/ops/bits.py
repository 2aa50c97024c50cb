"""Two-valued tensors in an eighth of a byte each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_GATHER = sum(1 << (56 - 7 * place) for place in range(8))  # times eight bytes of 0 or 1 it brings them together in the highest byte
_EACH = 0x0101010101010101  # the lowest bit of eight bytes
_OWN = 0x8040201008040201 - (1 << 64)  # of eight copies of a byte, bit i of the i-th


def packed_away(mask: torch.Tensor) -> torch.Tensor:
    """A boolean tensor's values as bits, in the order of its elements. The tensor itself may be used up: its memory serves as scratch.

    >>> packed_away(torch.tensor([True, False, True, False, False, False, False, False, True]))
    tensor([5, 1], dtype=torch.uint8)
    """
    flat = mask.reshape(-1)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.bool, device=mask.device)
        padded[: flat.numel()] = flat
        flat = padded
    words = flat.view(torch.int64)
    return words.mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpacked(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The boolean tensor that `packed_away` was given.

    >>> unpacked(packed_away(torch.tensor([[True, False], [False, True]])), (2, 2))
    tensor([[ True, False],
            [False,  True]])
    """
    spread = bits.to(torch.int64).mul_(_EACH).bitwise_and_(_OWN)
    spread.add_(0x7F * _EACH).bitwise_right_shift_(7).bitwise_and_(_EACH)  # a byte that is not zero reaches its highest bit
    return spread.view(torch.bool)[: math.prod(shape)].view(tuple(shape))


def rows_packed_away(mask: torch.Tensor) -> torch.Tensor:
    """The same with every row of the last dimension in bytes of its own, so that rows can be taken out of what is packed.

    >>> rows_packed_away(torch.tensor([[True, False, True], [False, True, False]])).tolist()
    [[5], [2]]
    """
    missing = -mask.shape[-1] % 8
    whole = torch.nn.functional.pad(mask, (0, missing)) if missing else mask
    return packed_away(whole).view(*mask.shape[:-1], -1)


def unpacked_rows(bits: torch.Tensor, length: int) -> torch.Tensor:
    """Some or all of the rows that `rows_packed_away` was given, each `length` long.

    >>> unpacked_rows(torch.tensor([[5]], dtype=torch.uint8), 3).tolist()
    [[True, False, True]]
    """
    whole = unpacked(bits.reshape(-1), (*bits.shape[:-1], 8 * bits.shape[-1]))
    return whole[..., :length]
