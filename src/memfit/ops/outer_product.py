"""Attention to an outer product c⊗c through its factor c: nothing of size E×E, and E numbers for a few queries at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memfit.ops.attention import attention_with_sums
from memfit.ops.attention_parts import HALF
from memfit.ops.kernel_parts import in_parts


def factored_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
    *,
    rows: int = 256,
) -> torch.Tensor:
    """Attention of [B, C, T] queries to their own keys and to the E columns of conv1d(context ⊗ context, weight, bias).

    `weight` is the 1×1 convolution's, [2C, E] or [2C, E, 1]; each head's part of its output is keys, then values. The result,
    [B, C, T], is that of the written-out form up to the order of sums (`materialised_attention`).

    >>> q, k, v = torch.randn(3, 2, 8, 5)
    >>> c, w, b = torch.randn(2, 6), torch.randn(16, 6), torch.randn(16)
    >>> torch.allclose(factored_attention(q, k, v, c, w, b, 2), materialised_attention(q, k, v, c, w, b, 2), atol=1e-5)
    True
    """
    batch, channels, tokens = query.shape
    size = channels // heads
    # contiguous copies take the place of the layer's output, of which otherwise both that and a copy for each product would be kept
    query, key, value = (t.reshape(batch, heads, size, -1).mT.contiguous() for t in (query, key, value))
    direction = context @ weight.flatten(1).mT  # the convolution of c⊗c at column j is direction · c_j + bias
    along_key, along_value = direction.view(batch, heads, 2, size).unbind(2)
    key_bias, value_bias = (direction.new_zeros(2, heads, size) if bias is None else bias.view(heads, 2, size).transpose(0, 1)).unbind()
    own, own_sums = attention_with_sums(query, key, value, rows=rows)
    both = torch.stack([along_key, key_bias.expand_as(along_key)], -1)
    slope, shift = (query @ both / math.sqrt(size)).unbind(-1)
    log_sum, mean = (t.view_as(slope) for t in rank_one_moments(slope.flatten(1), context, rows=rows))
    share = torch.sigmoid(log_sum + shift - own_sums)  # of the softmax's weight that goes to the context
    with torch.autocast(own.device.type, enabled=False):
        joined: torch.Tensor = _Joined.apply(own, share, mean, along_value, value_bias)  # type: ignore[no-untyped-call]
    return joined.mT.reshape(batch, channels, tokens)


def materialised_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: int,
) -> torch.Tensor:
    """The same with c⊗c, its keys and values, and the attention map all written out: what the factored form is measured against.

    >>> materialised_attention(*torch.randn(3, 2, 8, 5), torch.randn(2, 6), torch.randn(16, 6), None, 2).shape
    torch.Size([2, 8, 5])
    """
    batch, channels, tokens = query.shape
    size = channels // heads
    outer = torch.einsum("ab,ac->abc", context, context)
    columns = torch.nn.functional.conv1d(outer, weight.flatten(1).unsqueeze(-1), bias)
    more_keys, more_values = columns.reshape(batch * heads, 2 * size, -1).split(size, 1)
    query, key, value = (t.reshape(batch * heads, size, -1) for t in (query, key, value))
    key, value = torch.cat([more_keys, key], -1), torch.cat([more_values, value], -1)
    chances = torch.softmax(query.mT @ key / math.sqrt(size), -1)
    return (value @ chances.mT).reshape(batch, channels, tokens)


def rank_one_moments(slope: torch.Tensor, context: torch.Tensor, *, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """For each slope a of [B, N]: log Σ_j exp(a c_j), and the mean of c under softmax(a c), for c of [B, E].

    >>> [round(t.item(), 4) for t in rank_one_moments(torch.zeros(1, 1), torch.tensor([[1.0, 2.0, 6.0]]))]  # log 3, and the plain mean
    [1.0986, 3.0]
    """
    if slope.dtype in HALF or context.dtype in HALF:
        slope, context = slope.float(), context.float()
    with torch.autocast(slope.device.type, enabled=False):
        log_sum, mean = _Moments.apply(slope, context, rows)  # type: ignore[no-untyped-call]
    return log_sum, mean


class _Moments(torch.autograd.Function):
    """Keeps three numbers a query; exponentials exist for `rows` queries of one sample at a time."""

    @staticmethod
    def forward(ctx: Any, slope: torch.Tensor, context: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_sum, mean, spread = (torch.empty_like(slope, memory_format=torch.contiguous_format) for _ in range(3))
        highest, lowest = context.amax(1, keepdim=True), context.amin(1, keepdim=True)
        top = torch.maximum(slope * highest, slope * lowest)  # the largest exponent of each query, without looking at all of them
        with in_parts(_queries(slope, rows), slope) as parts:
            for sample, part in parts:
                c = context[sample]
                powers = torch.stack([torch.ones_like(c), c, c * c], 1)
                terms = torch.addr(-top[sample, part, None], slope[sample, part], c).exp_()
                sums = terms @ powers
                log_sum[sample, part] = sums[:, 0].log() + top[sample, part]
                mean[sample, part] = sums[:, 1] / sums[:, 0]
                spread[sample, part] = sums[:, 2] / sums[:, 0]
        ctx.save_for_backward(slope, context, log_sum, mean, spread)
        ctx.rows = rows
        return log_sum, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: torch.Tensor, grad_mean: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope, context, log_sum, mean, spread = ctx.saved_tensors
        grad_slope = grad_sum * mean + grad_mean * (spread - mean * mean)
        grad_context = torch.zeros_like(context)
        constant = grad_sum * slope + grad_mean * (1 - slope * mean)  # of the weight of c_j in the gradient: constant + linear · c_j
        linear = grad_mean * slope
        with in_parts(_queries(slope, ctx.rows), slope) as parts:
            for sample, part in parts:
                c = context[sample]
                chances = torch.addr(-log_sum[sample, part, None], slope[sample, part], c).exp_()
                both = torch.stack([constant[sample, part], linear[sample, part]]) @ chances
                grad_context[sample] += both[0] + both[1] * c
        return grad_slope, grad_context, None


def _queries(slope: torch.Tensor, rows: int) -> list[tuple[int, slice]]:
    """`rows` of one sample at a time."""
    return [(sample, slice(start, start + rows)) for sample in range(slope.shape[0]) for start in range(0, slope.shape[1], rows)]


class _Joined(torch.autograd.Function):
    """own + share · (mean · along + bias - own). Keeps `own` and a few numbers a query; the rest of its size is made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, share: torch.Tensor, mean: torch.Tensor, along: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(own, share, mean, along, bias)
        return _beside_own(own, mean, along, bias).mul_(share.unsqueeze(-1).to(own.dtype)).add_(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, share, mean, along, bias = ctx.saved_tensors
        grad_share = _beside_own(own, mean, along, bias).mul_(grad).sum(-1).to(share.dtype)
        of_context = grad * share.unsqueeze(-1).to(grad.dtype)
        grad_mean = (of_context @ along.unsqueeze(-1).to(grad.dtype)).squeeze(-1).to(mean.dtype)
        grad_along = (mean.unsqueeze(-2).to(grad.dtype) @ of_context).squeeze(-2).to(along.dtype)
        return grad - of_context, grad_share, grad_mean, grad_along, of_context.sum((0, 2)).to(bias.dtype)


def _beside_own(own: torch.Tensor, mean: torch.Tensor, along: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """How far the context's value is from the own one, [B, heads, T, size]."""
    of_context = torch.addcmul(bias.unsqueeze(1).to(own.dtype), mean.unsqueeze(-1).to(own.dtype), along.unsqueeze(2).to(own.dtype))
    return of_context.sub_(own)


class FactoredContext:
    """Stands for c⊗c in a model's code: it is handed on like the tensor, and keeps only c.

    >>> context = FactoredContext(torch.tensor([[1.0, 2.0]]))
    >>> context.materialised().tolist()
    [[[1.0, 2.0], [2.0, 4.0]]]
    >>> context.attended(*torch.randn(3, 1, 4, 5), torch.randn(8, 2), None, heads=2).shape
    torch.Size([1, 4, 5])
    """

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        heads: int,
    ) -> torch.Tensor:
        """`factored_attention` to this context."""
        return factored_attention(query, key, value, self.factor, weight, bias, heads)

    def materialised(self) -> torch.Tensor:
        """c⊗c itself, [B, E, E]: what one wanted to avoid."""
        return torch.einsum("ab,ac->abc", self.factor, self.factor)
