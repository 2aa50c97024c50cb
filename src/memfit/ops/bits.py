"""Two-valued tensors in an eighth of a byte each."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed(mask: torch.Tensor) -> torch.Tensor:
    """A boolean tensor's values as bits, in the order of its elements.

    >>> packed(torch.tensor([True, False, True, False, False, False, False, False, True]))
    tensor([5, 1], dtype=torch.uint8)
    """
    flat = mask.reshape(-1).view(torch.uint8)
    bits = torch.zeros((flat.numel() + 7) // 8, dtype=torch.uint8, device=mask.device)
    for place in range(8):
        every_eighth = flat[place::8]
        bits[: every_eighth.numel()] |= every_eighth << place
    return bits


def unpacked(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The boolean tensor that `packed` was given.

    >>> unpacked(packed(torch.tensor([[True, False], [False, True]])), (2, 2))
    tensor([[ True, False],
            [False,  True]])
    """
    mask = torch.empty(bits.numel() * 8, dtype=torch.uint8, device=bits.device)
    for place in range(8):
        mask[place::8] = (bits >> place) & 1
    count = 1
    for length in shape:
        count *= length
    return mask[:count].view(torch.bool).view(tuple(shape))
