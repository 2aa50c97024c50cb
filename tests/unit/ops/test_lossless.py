"""Lossless packing: the same bits from fewer bytes, or not at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ops.lossless import packed

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=2, max_size=40), st.sampled_from([torch.bool, *FLOATS]), st.sampled_from([1.0, 1.25, 1 / 0.7]))
def test_two_values(flags: list[bool], dtype: torch.dtype, high: float) -> None:
    tensor = torch.tensor(flags).to(dtype) * (high if dtype is not torch.bool else True)
    unpack = packed(tensor)
    assert unpack is not None and same_bits(unpack(), tensor) and same_bits(unpack(), tensor)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=20), st.sampled_from(WHOLE))
def test_whole_numbers(numbers: list[int], dtype: torch.dtype) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)
    unpack = packed(tensor)
    assert unpack is None or same_bits(unpack(), tensor)
    assert unpack is not None or dtype is torch.int16


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, float("nan"), float("inf"), 1e-45]), min_size=2, max_size=12))
def test_whatever_the_values_are_no_bit_is_lost(values: list[float]) -> None:
    tensor = torch.tensor(values)
    unpack = packed(tensor)
    assert unpack is None or same_bits(unpack(), tensor)


@pytest.mark.parametrize("values", [[0.0, -0.0, 1.0], [0.0, 1.0, 2.0], [float("nan"), 0.0, 1.0], [-1.0, 0.0, -1.0]])
def test_what_is_not_zero_or_one_high_value_stays_as_it_is(values: list[float]) -> None:
    assert packed(torch.tensor(values)) is None


def test_other_layouts_and_kinds_stay_as_they_are() -> None:
    assert packed(torch.ones(4, 4).t()[1:]) is None
    assert packed(torch.ones(4, dtype=torch.complex64)) is None
    assert packed(torch.ones(1)) is None
    assert packed(torch.tensor([0, 2**62])) is None


def test_two_and_a_large_number_are_bytes_fewer() -> None:
    mask = (torch.rand(1000) > 0.5).float()
    unpack = packed(mask)
    assert unpack is not None
    held = [cell.cell_contents for cell in unpack.__closure__ or () if isinstance(cell.cell_contents, torch.Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in held) <= 125 + 4
