from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ops.bits import packed_away, unpacked


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
