"""Attention in chunks is attention: outputs, gradients, masks and dropout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit.ops.attention import attention_in_chunks, attention_with_sums, fused_attention

MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(2, 1, 10, 7) > 0.4,
    "added": lambda: torch.randn(3, 10, 7, dtype=torch.float64),
    "keys only": lambda: torch.tensor([[True] * 5 + [False] * 2]),
    "a row with nothing": lambda: torch.cat([torch.zeros(1, 7), torch.ones(9, 7)]).bool(),
}


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True) for n, d in ((10, 4), (7, 4), (7, 5))]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_it_is_attention(name: str, rows: int) -> None:
    q, k, v = tensors()
    mask = MASKS[name]()
    ours = attention_in_chunks(q, k, v, mask, rows=rows)
    theirs = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), weights), torch.autograd.grad(theirs, (q, k, v), weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_added_mask_has_its_gradient_too() -> None:
    q, k, v = tensors()
    for shape in ((10, 7), (3, 1, 7), (2, 1, 10, 7)):
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda *a: attention_in_chunks(*a, rows=3), (q, k, v, mask))


def test_sums_have_gradients() -> None:
    q, k, v = tensors()
    assert torch.autograd.gradcheck(lambda *a: attention_with_sums(*a, rows=4), (q, k, v))


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout) @ v


@pytest.mark.parametrize("shape", [(2, 3, 10, 4), (2, 4, 70, 8)])
def test_dropout_draws_the_same_numbers(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    torch.manual_seed(1)
    ours = attention_in_chunks(q, q, q, dropout=0.3, rows=4)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    theirs = written_out(q, q, q, 0.3)
    assert torch.equal(after, torch.get_rng_state())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (ours, theirs)), rtol=1e-4, atol=1e-5)
    torch.manual_seed(2)  # the broken twin: other numbers
    assert not torch.allclose(attention_in_chunks(q, q, q, dropout=0.3, rows=4), theirs, rtol=1e-5, atol=1e-6)


def test_half_precision_and_autocast() -> None:
    q, k, v = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = attention_in_chunks(q, k, v, rows=3), F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_fused_attention_of_transposed_views_writes_no_map() -> None:
    """Convolutions give channels first; torch's kernels want them last and fall back to a map without a word."""
    q, k, v = (t.mT for t in torch.randn(3, 2, 4, 16, 128, requires_grad=True).unbind())

    def names(attend: object) -> set[str]:
        with torch.profiler.profile() as seen:
            attend(q, k, v)  # type: ignore[operator]
        return {event.name for event in seen.events()}

    assert "aten::_softmax" not in names(fused_attention) and "aten::_safe_softmax" not in names(fused_attention)
    assert names(F.scaled_dot_product_attention) & {"aten::_softmax", "aten::_safe_softmax"}  # torch's own way: the check can fail
    torch.testing.assert_close(fused_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_chunks_inside_a_checkpoint() -> None:
    """Which gives each saved tensor only once."""
    q, k, v = tensors()
    plain = attention_in_chunks(q, k, v, rows=4)
    inside = checkpoint(lambda *given: attention_in_chunks(*given, rows=4), q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(inside.sum(), (q, k, v)), torch.autograd.grad(plain.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_heads_may_share_keys_and_values() -> None:
    q = torch.randn(8, 4, 20, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(8, 1, 20, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outcomes = []
    for attend in (F.scaled_dot_product_attention, lambda q, k, v: attention_in_chunks(q, k, v, rows=16)):
        out = attend(q, k, v)
        outcomes.append((out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v))))
    for ours, torchs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, torchs)
