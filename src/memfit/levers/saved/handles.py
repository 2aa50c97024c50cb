"""What autograd holds in place of a saved tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memfit.levers.saved.elsewhere import Elsewhere
from memfit.levers.saved.table import BITS
from memfit.ops.lossless import packed
from memfit.ops.remaking import Kept, Node, Part, read_as, remake
from memfit.torch_private import detached


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
        nan = tensor.new_full((), float("nan"))
        self._value = Kept(nan.expand(tensor.shape)) if tensor.is_contiguous() else _StandIn(nan, tensor.shape, tensor.stride())


class _StandIn(NamedTuple):
    """Of a tensor in another order of memory: a convolution's backward goes by that, and would round differently for one without."""

    value: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]

    def get(self) -> torch.Tensor:
        """Made when backward asks, for as long as the operator runs."""
        return self.value.new_empty_strided(self.shape, self.stride).fill_(float("nan"))


def put_away(tensor: torch.Tensor, do: str, drawn: bool, elsewhere: Elsewhere | None) -> Node | None:
    """A node that brings back a tensor's memory from where or how it is kept; None where it cannot be kept so."""
    whole = _all_of_its_memory(tensor)
    if do == BITS:
        back = packed(whole) if drawn or not whole.is_floating_point() else None
    else:
        back = None if elsewhere is None else elsewhere.write(whole, do, Kept(detached(tensor)).get)
    return None if back is None else Node(back, (), {}, 0)


def _all_of_its_memory(tensor: torch.Tensor) -> torch.Tensor:
    plain = read_as(tensor.detach(), conjugated=False, negated=False)
    count = plain.untyped_storage().nbytes() // plain.element_size()
    return plain if plain.is_contiguous() and plain.numel() == count else plain.as_strided((count,), (1,), 0)
