"""What the contract needs of the process: the model with an outer product is described, and forgotten afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conditioned import describe
from memfit.levers import outer_product


@pytest.fixture(autouse=True)
def _described() -> Iterator[None]:
    before = dict(outer_product._ADAPTERS)
    describe()
    yield
    outer_product._ADAPTERS.clear()
    outer_product._ADAPTERS.update(before)
