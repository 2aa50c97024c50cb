"""Softmax attention that never holds its whole map: chunks of queries, computed again in backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from memfit.ops.attention_parts import InParts
from memfit.ops.bits import rows_packed_away

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
    return _in_parts(query, key, value, mask, scale, dropout, rows, False)[0]


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
    return _in_parts(query, key, value, mask, scale, dropout, rows, True)


def _in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout: float,
    rows: int,
    with_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    key, value = (t.expand(*query.shape[:-2], *t.shape[-2:]) for t in (key, value))  # heads may share theirs
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keep = _drawn(query, key, dropout) if dropout else None
    with torch.autocast(device, enabled=False):
        out, sums = InParts.apply(query, key, value, mask, keep, scale, 1 - dropout, rows, with_sums)  # type: ignore[no-untyped-call]
    return out, sums


def _drawn(query: torch.Tensor, key: torch.Tensor, dropout: float) -> torch.Tensor:
    """Which entries of the map dropout keeps, eight to a byte."""
    shape = (*query.shape[:-1], key.shape[-2])
    return rows_packed_away(torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - dropout))


def fused_workspaces(length: int, keys: int, size: int) -> tuple[int, int]:
    """Bytes that torch's fused attention takes inside on a CPU, forward and backward: blocks of the map for each thread."""
    block, threads = 256 if length >= 768 else 64 if length >= 192 else 32, torch.get_num_threads()
    return 4 * threads * block * (min(512, keys) + 2 + size), 8 * threads * block * min(512, keys)


def rows_for(length: int) -> int:
    """How many of `length` queries go at a time: an eighth, at most 128, so that a chunk is small beside the whole map.

    >>> rows_for(64), rows_for(256), rows_for(4096)
    (16, 32, 128)
    """
    return min(128, max(16, length // 8))
