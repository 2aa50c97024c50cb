"""The largest batch inside a budget, against a search that tries every size."""

from __future__ import annotations

import pytest
import torch

import memfit
from memfit.largest_batch import _by_growth, _by_trying, largest_batch, resized
from memfit.levers import LEVERS
from memfit.step import Step
from small_steps import dense


@pytest.mark.parametrize("budget", [0, 99, 130, 131, 500, 3000, 10**9])
def test_growth_that_is_linear_is_found_exactly(budget: int) -> None:
    sizes = [n for n in range(1, 65) if 100 + 31 * n <= budget]
    assert _by_growth(lambda n: 100 + 31 * n, 4, budget, 64) == max(sizes, default=0)


@pytest.mark.parametrize("limit", [7, 8, 9, 20, 63, 64, 100])
def test_trying_never_says_more_than_fits_and_comes_close(limit: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = _by_trying(fits, 7, 64)
    assert found <= min(limit, 64) <= max(found + 1, found * 17 / 16 + 1) and len(asked) <= 10


def test_batches_of_other_sizes_are_made_from_the_sample() -> None:
    step = dense()
    sample = {"x": torch.randn(2, 64), "scale": torch.tensor(3.0), "names": ["a"]}
    nested = Step(step.model, lambda m, b: m(b["x"]).mean(), step.optimizer, sample)
    batch = resized(nested, 5).batch
    assert torch.equal(batch["x"], nested.batch["x"][[0, 1, 0, 1, 0]]) and batch["scale"] == 3.0 and batch["names"] == ["a"]
    assert resized(nested, 2) is nested


def test_a_simulation_confirms_the_plain_size() -> None:
    step = dense()
    high = {n: memfit.profile(resized(step, n), simulate=True).process_high_bytes for n in (32, 2048)}
    none = {word: lever for word, lever in LEVERS.items() if word == "nothing"}
    found = largest_batch(step, high[2048], levers=none)
    assert high[32] < high[2048] and found.plain <= found.without_microbatch <= found.with_microbatch <= found.tried_up_to == 64 * 32
    assert memfit.profile(resized(step, found.plain), simulate=True).process_high_bytes <= high[2048] * 1.02
