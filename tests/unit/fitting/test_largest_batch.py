"""The largest batch inside a budget, against a search that tries every size."""

from __future__ import annotations

import pytest
import torch

import memfit
from memfit.fitting.largest_batch import LargestBatch, _by_growth, _by_trying, largest_batch, resized
from memfit.step import Step
from small_steps import dense


@pytest.mark.parametrize("budget", [0, 99, 130, 131, 500, 3000, 10**9])
def test_growth_that_is_linear_is_found_exactly(budget: int) -> None:
    sizes = [n for n in range(1, 65) if 100 + 31 * n <= budget]
    assert _by_growth(lambda n: 100 + 31 * n, 4, budget, 64) == max(sizes, default=0)


def test_growth_that_gets_slower_or_faster_is_followed() -> None:
    for high_of in (lambda n: int(100 + 400 * n**0.5), lambda n: int(100 + 20 * n**1.15)):
        best = max(n for n in range(1, 257) if high_of(n) <= 3000)
        assert 0.9 * best <= _by_growth(high_of, 4, 3000, 256) <= best


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


def test_a_budget_above_every_need_gives_the_largest_size_that_is_tried() -> None:
    found = largest_batch(dense(), 2**36)
    assert found == LargestBatch(64 * 32, 64 * 32, 64 * 32, 64 * 32)


def test_where_not_even_one_sample_fits_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def never(step: Step, budget: int, **options: object) -> None:
        asked.append((step.batch_size, "microbatch" in options["levers"]))  # type: ignore[operator]
        raise memfit.Infeasible("no", 1, {})

    monkeypatch.setattr("memfit.fitting.largest_batch.find_plan", never)
    assert largest_batch(dense(), 2**20) == LargestBatch(0, 0, 0, 64 * 32)
    assert asked == [(1, False), (1, True)]  # asked without and with micro-batches


def test_without_levers_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.fitting.largest_batch.find_plan", lambda *args, **options: pytest.fail("planned"))
    assert largest_batch(dense(), 2**20, levers={}) == LargestBatch(0, 0, 0, 64 * 32)
