"""The largest batch inside a budget, against a search that tries every size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.largest_batch import LargestBatch, _by_growth, _by_trying, largest_batch, resized
from memfit.levers import LEVERS
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


@pytest.mark.parametrize(("low", "most"), [(6, 16384), (0, 2048), (0, 1), (1, 2), (64, 64), (256, 64 * 256)])
def test_trying_ends_where_a_sixteenth_more_was_tried_and_does_not_fit_or_at_the_end(low: int, most: int) -> None:
    for limit in {low, low + 1, 3 * low, 17, 100, 1500, 2047, most - 1, most}:
        yes, no = {low}, {most + 1}

        def fits(size: int, limit: int = limit, yes: set[int] = yes, no: set[int] = no) -> bool:
            assert low < size <= most and size not in yes | no
            (yes if size <= limit else no).add(size)
            return size <= limit

        found = _by_trying(fits, low, most)
        assert found == max(yes) and min(no) - found <= max(1, found // 16)
        assert len(yes) + len(no) - 2 <= 14  # each is a plan


def test_growth_whose_slope_misleads_is_searched_to_the_same_end() -> None:
    for limit in (0, 1, 3, 5, 31, 33, 100, 1000, 2047):
        tried: dict[int, int] = {}

        def high_of(size: int, limit: int = limit, tried: dict[int, int] = tried) -> int:
            tried[size] = size if size <= limit else 10**9 + size  # as where another kernel is chosen beyond a size
            return tried[size]

        found = _by_growth(high_of, 32, 10**6, 2048)
        no = min((size for size, high in tried.items() if high > 10**6), default=2049)
        assert found == max((size for size, high in tried.items() if high <= 10**6), default=0)
        assert no - found <= max(1, found // 16)


def test_batches_of_other_sizes_are_made_from_the_sample() -> None:
    step = dense()
    sample = {"x": torch.randn(2, 64), "scale": torch.tensor(3.0), "names": ["a"]}
    nested = Step(step.model, lambda m, b: m(b["x"]).mean(), step.optimizer, sample)
    batch = resized(nested, 5).batch
    assert torch.equal(batch["x"], nested.batch["x"][[0, 1, 0, 1, 0]]) and batch["scale"] == 3.0 and batch["names"] == ["a"]
    assert resized(nested, 2).batch is sample


def test_variants_are_asked_on_as_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another model takes on a batch of its own says nothing of this size."""
    monkeypatch.setattr("memfit.fitting.largest_batch._AT_MOST", 8)
    whole = 2**16
    variants = {"narrow": lambda: mlp(128, whole), "half the batch": lambda: mlp(256, whole // 2)}
    step = replace(built_without_memory(lambda: mlp(256, whole)), variants=variants)
    grown = resized(resized(step, 9), 3 * whole)
    assert {name: build().batch_size for name, build in grown.variants.items()} == dict.fromkeys(variants, 3 * whole)
    plain = memfit.profile(step, simulate=True, device="cuda")
    budget = plain.process_high_bytes - plain.peak_bytes // 4
    found = largest_batch(step, budget, allow="altered", device="cuda", levers={"architecture": LEVERS["architecture"]})
    assert found.plain < whole < found.without_microbatch < 2 * whole  # narrow takes half as much, and three quarters of it fit
    narrow = resized(built_without_memory(variants["narrow"]), found.without_microbatch)
    assert memfit.profile(narrow, simulate=True, device="cuda").process_high_bytes <= budget


def mlp(width: int, samples: int) -> Step:
    net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(width, 1))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(samples, 16))


def test_batches_that_wait_in_a_loader_grow_with_the_batch() -> None:
    """Its workers are started once, whatever the size."""
    net = nn.Linear(256, 1)
    data = TensorDataset(torch.randn(1024, 256))
    loader = DataLoader(data, batch_size=256, num_workers=2, prefetch_factor=2)
    step = Step(net, lambda m, b: m(b[0]).mean(), torch.optim.SGD(net.parameters(), 0.1), (torch.randn(256, 256),), loader=loader)
    one, four = (memfit.profile(resized(step, size), simulate=True).process for size in (256, 1024))
    assert one.waiting_bytes == 2 * 2 * 256 * 256 * 4 and four.waiting_bytes == 4 * one.waiting_bytes
    assert four.workers_bytes - four.waiting_bytes == one.workers_bytes - one.waiting_bytes
    assert memfit.profile(step, simulate=True).process.waiting_bytes == one.waiting_bytes


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
