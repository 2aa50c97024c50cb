"""Softmax attention a part of its map at a time, forward and backward: some heads, and of one head some queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memfit.ops.bits import unpacked_rows
from memfit.ops.kernel_parts import in_parts

HALF = (torch.float16, torch.bfloat16)
Part = tuple[slice, slice, slice]  # of samples, heads and queries


class InParts(torch.autograd.Function):
    """Keeps queries, keys, values and the result, and dropout's draws as bits; probabilities exist for one part at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        keep: torch.Tensor | None,
        scale: float,
        kept: float,
        rows: int,
        with_sums: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and the logarithm of each query's sum of exponentials if asked for."""
        out = _empty_result(query, value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=_exact(query.dtype)) if with_sums else None
        with in_parts(_parts(query.shape, rows), query) as parts:
            for part in parts:
                _attend_to_part((query, key, value, mask, keep), out, sums, scale, kept, part)
        ctx.save_for_backward(query, key, value, mask, keep, out)
        ctx.settings = scale, kept, rows
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, grad_sums: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Probabilities are computed again."""
        *given, out = ctx.saved_tensors  # read once: a checkpoint gives each only once, and memfit may have to make it again
        query, key, value, mask, _ = given
        scale, kept, rows = ctx.settings
        grad_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        grads = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value), grad_mask
        with in_parts(_parts(query.shape, rows), query) as parts:
            for part in parts:
                _differentiate_part(given, out, grad_out, grad_sums, grads, scale, kept, part)
        return *grads, None, None, None, None, None


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _empty_result(query: torch.Tensor, size: int) -> torch.Tensor:
    """Laid out as fused kernels do, heads next to channels, so that joining heads afterwards copies nothing."""
    if query.dim() != 4:
        return query.new_empty(*query.shape[:-1], size)
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, size).transpose(1, 2)


def largest_part(shape: Sequence[int], rows: int) -> int:
    """How many queries of a map are looked at together, counted over samples and heads.

    >>> largest_part((2, 4, 64, 64), 16), largest_part((2, 4, 64, 64), 4)  # two whole heads; half of one
    (128, 32)
    """
    beyond = math.prod(shape[:-4])
    return max(beyond * math.prod(int(place.stop - place.start) for place in part) for part in _parts(shape, rows))


def _parts(shape: Sequence[int], rows: int) -> list[Part]:
    """As large as `rows` queries of every head, but whole heads where they are not larger: fewer, longer products."""
    samples, heads, length = (1,) * (4 - len(shape)) + tuple(shape[-4:-1])
    most = rows * heads * samples
    counts = max(1, most // (heads * length)), max(1, most // length), most
    cuts = [[slice(i, min(i + n, size)) for i in range(0, size, n)] for n, size in zip(counts, (samples, heads, length), strict=True)]
    return [(s, h, r) for s in cuts[0] for h in cuts[1] for r in cuts[2]]


def _at(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of [samples, heads, queries, anything]; dimensions in front may be missing or of size 1."""
    own = part[max(0, 4 - tensor.dim()) :]
    sizes = tensor.shape[-1 - len(own) : -1]
    places: tuple[Any, ...] = tuple(place if size > 1 else slice(None) for size, place in zip(sizes, own, strict=True))
    return tensor[(..., *places, slice(None))]


def _all_keys(part: Part) -> Part:
    return (*part[:2], slice(None))


def _attend_to_part(given: Any, out: torch.Tensor, sums: torch.Tensor | None, scale: float, kept: float, part: Part) -> None:
    """A function of its own, so that a part is gone before the next is made."""
    value = _at(given[2], _all_keys(part))
    scores, seen = _scores(given, part, scale)
    chances = scores.softmax(-1)
    if sums is not None:  # the largest probability is exp(largest score - logarithm of the sum)
        total = scores.amax(-1, keepdim=True).sub_(chances.amax(-1, keepdim=True).log_())
        _at(sums.unsqueeze(-1), part).copy_(total if seen is None else total.masked_fill_(seen == 0, -math.inf))
    del scores
    if (draws := _draws(given, part, chances)) is not None:
        chances.mul_(draws)
    result = chances.to(value.dtype) @ value
    if seen is not None:
        result.mul_(seen)
    _at(out, part).copy_(result if kept == 1 else result.div_(kept))


def _differentiate_part(
    given: Any,
    out: torch.Tensor,
    grad_out: torch.Tensor,
    grad_sums: torch.Tensor | None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    scale: float,
    kept: float,
    part: Part,
) -> None:
    query, key, value = _at(given[0], part), _at(given[1], _all_keys(part)), _at(given[2], _all_keys(part))
    grad_query, grad_key, grad_value, grad_mask = grads
    scores, seen = _scores(given, part, scale)
    chances = scores.softmax(-1)
    del scores
    grad_part = _at(grad_out, part) if seen is None else _at(grad_out, part) * seen
    mean = (grad_part * _at(out, part)).sum(-1, keepdim=True).to(chances.dtype)
    if grad_sums is not None:
        along = _at(grad_sums.unsqueeze(-1), part)
        mean -= along if seen is None else along * seen
    grad_part = grad_part if kept == 1 else grad_part / kept
    draws = _draws(given, part, chances)
    dropped = chances if draws is None else chances * draws
    _at(grad_value, _all_keys(part)).add_(dropped.to(value.dtype).mT @ grad_part)
    del dropped
    grad = (grad_part @ value.mT).to(chances.dtype)
    if draws is not None:
        grad.mul_(draws)
        del draws
    grad.sub_(mean).mul_(chances)
    del chances
    if grad_mask is not None:
        of_mask = _at(grad_mask, part)
        of_mask.add_(grad.sum_to_size(of_mask.shape))
    grad = grad.to(query.dtype)
    _at(grad_query, part).copy_((grad @ key).mul_(scale))
    _at(grad_key, _all_keys(part)).add_(grad.mT @ (query * scale))


def _scores(given: Any, part: Part, scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores with the mask added; and 0 for each query that may look at nothing, whose result is none as in torch's own, else 1."""
    query, key, _, mask, _ = given
    scores = (_at(query, part) * scale) @ _at(key, _all_keys(part)).mT
    scores = scores.to(_exact(scores.dtype))
    if mask is None:
        return scores, None
    own = _at(mask, part)
    if own.dtype is torch.bool:
        blind = ~own.any(-1, keepdim=True)
        added = torch.zeros_like(own, dtype=scores.dtype).masked_fill_(~(own | blind), -math.inf)
    else:
        blind = (own == -math.inf).all(-1, keepdim=True)
        added = own.masked_fill(blind, 0.0)
    return scores.add_(added), (~blind).to(query.dtype)


def _draws(given: Any, part: Part, chances: torch.Tensor) -> torch.Tensor | None:
    """1 where dropout keeps an entry, 0 where it does not."""
    return None if given[4] is None else unpacked_rows(_at(given[4], part), chances.shape[-1]).to(chances.dtype)
