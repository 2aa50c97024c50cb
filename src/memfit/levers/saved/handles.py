"""What autograd holds in place of a saved tensor."""

from __future__ import annotations

from typing import Any

import torch

from memfit.levers.saved.table import BITS, DISK, HOST
from memfit.ops.bits import Unpack, packed
from memfit.ops.host import OnHost
from memfit.ops.remaking import Kept, Part, remake
from memfit.ops.spill import Spill


class Handle:
    """Gives the saved tensor back, however it is kept."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> torch.Tensor:
        """The tensor, the same bits as when it was saved."""
        value = self._value
        return value.of(remake(value.node)) if type(value) is Part else value.get()

    def is_of(self, tensor: torch.Tensor, part: Part | None) -> bool:
        """Whether this stands for that very tensor, which could be made again as `part`."""
        if type(self._value) is Kept:
            kept = self._value.tensor
            return kept.untyped_storage() is tensor.untyped_storage() and kept.shape == tensor.shape
        return part is not None and self._value == part

    def drop(self, tensor: torch.Tensor) -> None:
        """Let go of a tensor that backward never reads: a stand-in of one number remains, which would show if it were read."""
        self._value = Kept(tensor.new_full((), float("nan")).expand(tensor.shape))


def stored(tensor: torch.Tensor, how: str, spill: Spill | None) -> Any:
    """A tensor kept as a plan says, or as it is where that cannot be."""
    if how == DISK and spill is not None and tensor.device.type == "cpu":
        return spill.write(tensor)
    if how == HOST and tensor.device.type != "cpu":
        return OnHost(tensor)
    if how == BITS and (unpack := packed(tensor)) is not None:
        return _Packed(unpack)
    return Kept(tensor)


class _Packed:
    """A tensor in fewer bytes."""

    __slots__ = ("get",)

    def __init__(self, unpack: Unpack) -> None:
        self.get = unpack
