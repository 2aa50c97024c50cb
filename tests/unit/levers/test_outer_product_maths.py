"""The factored form is the written-out one: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from memfit.ops.outer_product import factored_attention, materialised_attention, rank_one_moments


def given(dtype: torch.dtype, size: float = 1.0, batch: int = 3, width: int = 24, tokens: int = 10) -> list[torch.Tensor]:
    shapes = [(batch, 8, tokens)] * 3 + [(batch, width), (16, width, 1), (16,)]
    return [(size * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]


def both(inputs: list[torch.Tensor], heads: int = 2, **options: int) -> list[tuple[torch.Tensor, ...]]:
    weights = torch.randn(inputs[0].shape, dtype=inputs[0].dtype)
    found = []
    for form in (lambda *a: factored_attention(*a, **options), materialised_attention):
        out = form(*inputs, heads)
        found.append((out, *torch.autograd.grad(out, inputs, weights)))
    return found


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_float64_to_ten_digits(rows: int, heads: int) -> None:
    for ours, theirs in zip(*both(given(torch.float64), heads, rows=rows), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_float32_within_reordering() -> None:
    for ours, theirs in zip(*both(given(torch.float32)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))


def test_large_numbers_do_not_overflow() -> None:
    for ours, theirs in zip(*both(given(torch.float64, size=12.0)), strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_zero_condition_is_the_bias_and_no_bias_is_zero() -> None:
    inputs = given(torch.float64)
    with torch.no_grad():
        inputs[3][1] = 0.0  # a dropped condition: its E columns are the bias, and count in the softmax
    for ours, theirs in zip(*both(inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    q, k, v, c, w, _ = inputs
    torch.testing.assert_close(factored_attention(q, k, v, c, w, None, 2), materialised_attention(q, k, v, c, w, None, 2))


def test_gradcheck() -> None:
    slope, context = torch.randn(2, 5, dtype=torch.float64, requires_grad=True), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: rank_one_moments(*a, rows=2), (slope, context))
    assert torch.autograd.gradcheck(lambda *a: factored_attention(*a, 2, rows=3), given(torch.float64, batch=2, width=5, tokens=4))


def test_a_form_that_forgets_the_bias_is_caught() -> None:
    q, k, v, c, w, b = given(torch.float64)
    wrong, right = factored_attention(q, k, v, c, w, None, 2), materialised_attention(q, k, v, c, w, b, 2)
    assert not torch.allclose(wrong, right, rtol=1e-3)
