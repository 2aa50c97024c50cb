"""Random draws of a whole batch, and what a part of the batch has of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_NEVER_DRAWS = ("_scaled_dot_product_flash_attention_for_cpu",)  # marked as random, but with dropout the CPU takes another path
_LIKE = ("rand_like", "randn_like", "randint_like")


class NotReplayable(RuntimeError):
    """A part's random numbers cannot be taken from the whole batch's."""


@functools.cache
def kind_of_draw(op: Any) -> str:
    """How an operator draws: "" not at all, "mask", "fill", "make", "like", "dropout", or "other", by the values it is given.

    >>> kind_of_draw(torch.ops.aten.relu.default), kind_of_draw(torch.ops.aten.bernoulli_.float)
    ('', 'mask')
    """
    name = str(op._schema.name).removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded not in op.tags or name in _NEVER_DRAWS:
        return ""
    arguments = {argument.name: str(argument.type) for argument in op._schema.arguments}
    if "out" in arguments or op.namespace != "aten":
        return "other"
    if name == "native_dropout":
        return "dropout"
    if name in _LIKE:
        return "other" if "Tensor" in op._overloadname else "like"
    if "size" in arguments:
        return "make"
    tensors = [argument for argument, kind in arguments.items() if "Tensor" in kind]
    if name.endswith("_") and tensors == ["self"]:
        return "mask" if name == "bernoulli_" else "fill"
    return "other"


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes random numbers: dropout of rate 0 does not.

    >>> dropout, ones = torch.ops.aten.native_dropout.default, torch.ones(2)
    >>> draws(dropout, (ones, 0.5, True), {}), draws(dropout, (ones, 0.5, False), {})
    (True, False)
    """
    if not kind_of_draw(op):
        return False
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 1.0)) and given.get("train", True) is not False and given.get("training", True) is not False


@dataclass(frozen=True)
class Drawn:
    """What a step draws for the whole batch in one call; `order` lists the dimensions from outermost to innermost in memory.

    `rows_follow`: where a sample has several rows, they come one after the other, and samples do not take turns.
    """

    op: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    rows_follow: bool = True

    def enlarged(self, shape: Sequence[int], part: int, batch: int, total: int) -> tuple[tuple[int, ...], int | None] | None:
        """For a call of `shape` on `part` samples: what all `total` samples draw, and the dimension that holds them (None: shared by all).

        `batch` is the number of samples that drew `self.shape`. None: the two do not fit together.

        >>> Drawn("aten.bernoulli_.float", (4, 8)).enlarged((1, 8), part=1, batch=4, total=6)
        ((6, 8), 0)
        >>> Drawn("aten.rand.default", (3,)).enlarged((3,), part=1, batch=4, total=6)
        ((3,), None)
        >>> Drawn("aten.rand.default", (4, 8)).enlarged((4, 7), part=4, batch=4, total=6)
        ((6, 7), 0)
        """
        if len(shape) != len(self.shape):
            return None
        scaled = [] if part == batch == total else self._scaled(shape, part, batch)
        if not scaled:
            return (self.shape, None) if tuple(shape) == self.shape else None
        if len(scaled) > 1:
            scaled = [d for d in scaled if self.shape[d] == batch]
        if len(scaled) != 1 or shape[scaled[0]] % part:
            return None
        (dim,) = scaled
        if self.shape[dim] != batch and (part == batch or not self.rows_follow):
            return None
        return (*shape[:dim], shape[dim] // part * total, *shape[dim + 1 :]), dim

    def _scaled(self, shape: Sequence[int], part: int, batch: int) -> list[int]:
        """The dimensions that are as much of the whole batch's as the part is; where that is all of it, those that may hold samples."""
        pairs = enumerate(zip(shape, self.shape, strict=True))
        if part == batch:
            return [d for d, (mine, whole) in pairs if mine == whole > 0 and mine % batch == 0]
        return [d for d, (mine, whole) in pairs if mine != whole and mine * batch == whole * part]

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An empty tensor of another size that lies in memory as the whole batch's did: kernels draw in that order."""
        order = self.order or tuple(range(len(shape)))
        back = sorted(range(len(order)), key=order.__getitem__)
        return torch.empty([shape[d] for d in order], dtype=dtype, device=device).permute(back)


def order_of(strides: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from outermost to innermost; () where that is their own order.

    >>> order_of((32, 128, 1)), order_of(())
    ((1, 0, 2), ())
    """
    order = tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
    return () if order == tuple(range(len(order))) else order
