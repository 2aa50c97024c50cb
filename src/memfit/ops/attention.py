"""Softmax attention that never holds its whole map: chunks of queries, computed again in backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memfit.ops.bits import rows_packed_away, unpacked_rows

HALF = (torch.float16, torch.bfloat16)
Attend = Callable[..., torch.Tensor]  # called like scaled_dot_product_attention
_fused = torch.nn.functional.scaled_dot_product_attention


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention; in chunks of queries with dropout on a CPU, where torch has no fused kernel and writes maps out.

    >>> q = torch.randn(1, 2, 10, 4)
    >>> torch.equal(fused_attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    True
    """
    if not dropout_p or query.device.type != "cpu":
        # fused kernels want channels next to each other; handed a transposed view, torch writes the map out without a word
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        return _fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _by_rows(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rows=rows_for(query.shape[-2]))


def in_chunks_of(rows: int) -> Attend:
    """`attention_in_chunks`, called like scaled_dot_product_attention.

    >>> q = torch.randn(1, 2, 10, 4)
    >>> causal = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(in_chunks_of(3)(q, q, q, is_causal=True), causal, atol=1e-6)
    True
    """
    return partial(_by_rows, rows=rows)


def _by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rows: int,
) -> torch.Tensor:
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return attention_in_chunks(query, key, value, attn_mask, scale=scale, dropout=dropout_p, rows=rows)


def attention_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    rows: int = 128,
) -> torch.Tensor:
    """softmax(query key^T · scale + mask) value for [..., tokens, channels], `rows` queries at a time.

    `mask` is as in scaled_dot_product_attention: true where attention is allowed, or numbers that are added. Dropout draws the
    numbers that dropout of the whole map would draw.

    >>> q = torch.randn(2, 3, 10, 4)
    >>> torch.allclose(attention_in_chunks(q, q, q, rows=4), torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-6)
    True
    """
    return attention_with_sums(query, key, value, mask, scale=scale, dropout=dropout, rows=rows)[0]


def attention_with_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    rows: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_in_chunks`, with the logarithm of each query's sum of exponentials, [..., tokens]: to join it with other keys.

    >>> q = torch.zeros(1, 5, 2)
    >>> attention_with_sums(q, q, q)[1].exp().tolist()[0][0]
    5.0
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keep = _drawn(query, key, dropout) if dropout else None
    with torch.autocast(device, enabled=False):
        out, sums = _Chunked.apply(query, key, value, mask, keep, scale, 1 - dropout, rows)  # type: ignore[no-untyped-call]
    return out, sums


def _drawn(query: torch.Tensor, key: torch.Tensor, dropout: float) -> torch.Tensor:
    """Which entries of the map dropout keeps, eight to a byte."""
    shape = (*query.shape[:-1], key.shape[-2])
    return rows_packed_away(torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - dropout))


class _Chunked(torch.autograd.Function):
    """Keeps queries, keys, values, the result and one number a query; probabilities exist for one chunk at a time."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = _empty_result(query, value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32 if query.dtype in HALF else query.dtype)
        ctx.settings = scale, kept, rows
        for part in _parts(query.shape[-2], rows):
            _attend_to_part(query, key, value, mask, keep, out, sums, scale, kept, part)
        ctx.save_for_backward(query, key, value, mask, keep, out, sums)
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, grad_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint gives each only once, and memfit may have to make it again
        query, key, value, mask = saved[:4]
        rows = ctx.settings[2]
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for part in _parts(query.shape[-2], rows):
            _differentiate_part(saved, ctx.settings, grad_out, grad_sums, (grad_query, grad_key, grad_value, grad_mask), part)
        return grad_query, grad_key, grad_value, grad_mask, None, None, None, None


def _empty_result(query: torch.Tensor, size: int) -> torch.Tensor:
    """Laid out as fused kernels do, heads next to channels, so that joining heads afterwards copies nothing."""
    if query.dim() != 4:
        return query.new_empty(*query.shape[:-1], size)
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, size).transpose(1, 2)


def fused_workspaces(length: int, keys: int, size: int) -> tuple[int, int]:
    """Bytes that torch's fused attention takes inside on a CPU, forward and backward: blocks of the map for each thread."""
    block, threads = 256 if length >= 768 else 64 if length >= 192 else 32, torch.get_num_threads()
    return 4 * threads * block * (min(512, keys) + 2 + size), 8 * threads * block * min(512, keys)


def _attend_to_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    kept: float,
    part: slice,
) -> None:
    """A function of its own, so that a chunk is gone before the next is made."""
    scores = _scores(query, key, mask, part, scale)
    sums[..., part] = scores.logsumexp(-1)
    chances = _chances(scores, sums[..., part])
    if keep is not None:
        chances = chances.masked_fill_(_lost(keep, part, key), 0.0).div_(kept)
    out[..., part, :] = chances.to(value.dtype) @ value


def _differentiate_part(
    saved: tuple[torch.Tensor, ...],
    settings: tuple[float, float, int],
    grad_out: torch.Tensor,
    grad_sums: torch.Tensor,
    grads: tuple[torch.Tensor | None, ...],
    part: slice,
) -> None:
    query, key, value, mask, keep, out, sums = saved
    scale, kept, _ = settings
    grad_query, grad_key, grad_value, grad_mask = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    chances = _chances(_scores(query, key, mask, part, scale), sums[..., part])
    grad_part = grad_out[..., part, :]
    lost = None if keep is None else _lost(keep, part, key)
    grad_value += (chances if lost is None else chances.masked_fill(lost, 0.0).div_(kept)).to(value.dtype).mT @ grad_part
    grad = (grad_part @ value.mT).to(chances.dtype)
    if lost is not None:
        grad = grad.masked_fill_(lost, 0.0).div_(kept)
    mean = (grad_part * out[..., part, :]).sum(-1).to(grad.dtype)
    grad = grad.sub_((mean - grad_sums[..., part]).unsqueeze(-1)).mul_(chances)
    del chances
    if grad_mask is not None:
        _rows_of(grad_mask, part).add_(grad.sum_to_size(_rows_of(grad_mask, part).shape))
    grad = grad.mul_(scale).to(query.dtype)
    grad_query[..., part, :] = grad @ key
    grad_key += grad.mT @ query[..., part, :]


def _lost(keep: torch.Tensor, part: slice, key: torch.Tensor) -> torch.Tensor:
    return unpacked_rows(keep[..., part, :], key.shape[-2]).logical_not_()


def rows_for(length: int) -> int:
    """How many of `length` queries go at a time: an eighth, at most 128, so that a chunk is small beside the whole map.

    >>> rows_for(64), rows_for(256), rows_for(4096)
    (16, 32, 128)
    """
    return min(128, max(16, length // 8))


def _parts(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def _rows_of(mask: torch.Tensor, part: slice) -> torch.Tensor:
    return mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., part, :]


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, part: slice, scale: float) -> torch.Tensor:
    scores = query[..., part, :] @ key.mT
    scores = (scores.float() if scores.dtype in HALF else scores).mul_(scale)
    if mask is None:
        return scores
    allowed = _rows_of(mask, part)
    return scores.masked_fill_(~allowed, -math.inf) if allowed.dtype is torch.bool else scores.add_(allowed)


def _chances(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Probabilities; a query that may look at nothing has none, as in scaled_dot_product_attention."""
    return scores.sub_(sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp_()
