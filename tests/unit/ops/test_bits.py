from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ops.bits import packed_away, rows_packed_away, unpacked, unpacked_rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 70), st.integers(0, 9), st.integers(0, 2**31))
def test_bits_come_back(count: int, start: int, seed: int) -> None:
    whole = torch.rand(start + count, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = whole[start:]
    expected = mask.clone()
    bits = packed_away(mask)
    assert bits.numel() == -(-count // 8)
    assert torch.equal(unpacked(bits, (count,)), expected)


def test_a_transposed_mask_keeps_its_order() -> None:
    mask = torch.rand(6, 4) < 0.5
    expected = mask.t().clone()
    assert torch.equal(unpacked(packed_away(mask.t()), (4, 6)), expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64])
def test_rows_can_be_taken_out(length: int) -> None:
    mask = torch.rand(3, 5, length) < 0.5
    expected = mask.clone()
    bits = rows_packed_away(mask)
    assert bits.shape == (3, 5, -(-length // 8))
    assert torch.equal(unpacked_rows(bits, length), expected)
    assert torch.equal(unpacked_rows(bits[:, 1:4], length), expected[:, 1:4])
