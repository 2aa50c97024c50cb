from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import MemfitError
from memfit.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GiB", 6 * 2**30), ("850 MB", 850_000_000), ("1.5gib", 3 * 2**29), (".5 KiB", 512), ("4096", 4096), (7, 7), ("10b", 10)],
)
def test_amounts_are_read(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "six",
        "6 GiBi",
        "-3GiB",
        "0",
        0,
        -1,
        "GiB",
        "1e9",
        None,
        2.5,
        True,
        "0.1",
        "0.0001 KB",
        "9" * 400,
        "9" * 400 + "GiB",
        10**400,
        "9" * 5000,
    ],
)
def test_amounts_that_are_none(text: Any) -> None:
    with pytest.raises(
        MemfitError, match=rf"^{text!r} is not an amount of memory above zero: write a number and a unit, as in 6GiB, 850MB or 1\.5GiB"
    ):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_what_is_printed_is_near_what_is_meant(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.0051 * count
    assert len(format_bytes(count)) <= 8


@given(st.integers(1, 2**50))
def test_what_is_printed_as_enough_is_enough(count: int) -> None:
    enough = format_bytes(count, up=True)
    assert count <= parse_bytes(enough) <= 1.0101 * count
    assert len(enough) <= 8
