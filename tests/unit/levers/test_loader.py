from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lever_law import differences, made, simulated, state_after
from memfit import Step
from memfit.levers import LEVERS, CannotApply
from memfit.ops.random_samples import draws_random_numbers
from memfit.records import Option

LEVER = LEVERS["loader"]
MIB = 2**20


class Heavy(Dataset[torch.Tensor]):
    """Each worker makes itself a cache; each sample is large."""

    cache: torch.Tensor | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(30 * MIB)
        return torch.full((MIB // 4,), float(index))


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index)) + torch.rand(())


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12.0))


def with_loader(dataset: Any, **settings: Any) -> Step:
    net = nn.Linear(1, 1)
    loader = DataLoader(dataset, **settings)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return Step(net, lambda m, x: m(x[:, None]).mean(), optimizer, torch.ones(4), loader=loader)


def shuffled(**settings: Any) -> Step:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.arange(22.0))
    return with_loader(data, batch_size=4, shuffle=True, generator=generator, num_workers=2, **settings)


def epochs(step: Step, count: int = 2) -> list[Any]:
    torch.manual_seed(5)
    assert step.loader is not None
    return [[batch[0].tolist() for batch in step.loader] for _ in range(count)] + [torch.rand(1).tolist()]


CHANGES = [{"num_workers": 0}, {"num_workers": 1}, {"prefetch_factor": 1}, {"pin_memory": False}]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("settings", CHANGES, ids=str)
def test_the_same_samples_in_the_same_order(settings: dict[str, Any], persistent: bool) -> None:
    plain, changed = (shuffled(persistent_workers=persistent) for _ in range(2))
    undo = LEVER.apply(changed, Option("loader", "", "bitwise", settings))
    assert all(getattr(changed.loader, name) == value for name, value in settings.items())
    assert epochs(changed) == epochs(plain)
    undo()
    assert epochs(changed) == epochs(plain)
    LEVER.apply(changed, Option("loader", "", "bitwise", settings))  # now with workers that are running
    assert epochs(changed) == epochs(plain)


def test_the_order_can_differ() -> None:
    other = with_loader(TensorDataset(torch.arange(22.0)), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4))
    assert epochs(other) != epochs(shuffled())


def test_without_a_generator_the_order_comes_from_torchs_own_numbers() -> None:
    plain, changed = (with_loader(TensorDataset(torch.arange(22.0)), batch_size=4, shuffle=True, num_workers=2) for _ in range(2))
    LEVER.apply(changed, Option("loader", "", "bitwise", {"num_workers": 0}))
    assert epochs(changed) == epochs(plain)


def test_undo_restores_the_loader() -> None:
    step = shuffled(persistent_workers=True, prefetch_factor=3)
    loader = step.loader
    before = dict(vars(loader))
    undo = LEVER.apply(step, Option("loader", "", "bitwise", {"num_workers": 0}))
    assert step.loader is loader and vars(loader) != before
    undo()
    assert vars(loader) == before
    made_again = DataLoader(loader.dataset, num_workers=2, persistent_workers=True)  # type: ignore[union-attr]
    assert set(vars(made_again)) == set(before)


def test_workers_and_waiting_batches_are_predicted() -> None:
    """What the workers take after the change is what the rewrite said, but for pages that a worker touches as it fetches more."""
    before = simulated(with_loader(Heavy(), batch_size=2, num_workers=2, prefetch_factor=8))
    assert before.process.waiting_bytes == 2 * 8 * 2 * MIB
    for option in LEVER.options(before):
        predicted = LEVER.rewrite(before, option).process
        step = with_loader(Heavy(), batch_size=2, num_workers=2, prefetch_factor=8)
        with LEVER.apply(step, option):
            after = simulated(step).process
        assert predicted.workers_bytes == pytest.approx(after.workers_bytes, rel=0.2, abs=8 * MIB), option.name
        assert (predicted.workers, predicted.waiting_bytes) == (after.workers, after.waiting_bytes)
        assert predicted.workers_bytes < before.process.workers_bytes


def test_the_training_is_the_same() -> None:
    def make() -> Step:
        return with_loader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=1)

    step = made(make)
    with LEVER.apply(step, Option("loader", "", "bitwise", {"num_workers": 0})):
        assert differences(state_after(made(make)), state_after(step)) == []


def test_random_samples_are_redrawn() -> None:
    step = with_loader(Augmented(), batch_size=4, num_workers=2)
    ledger = simulated(step)
    options = {o.name: o for o in LEVER.options(ledger)}
    assert {name: o.exactness for name, o in options.items()} == {
        "1 batch fetched ahead": "bitwise",
        "1 worker": "redrawn",
        "1 worker, 1 batch fetched ahead": "redrawn",
        "no workers": "redrawn",
    }
    plain = epochs(step)
    with LEVER.apply(step, options["no workers"]):
        assert epochs(step) != plain  # so the class is not too careful
    with LEVER.apply(step, options["1 batch fetched ahead"]):
        assert epochs(step) == plain


def test_what_draws_random_numbers_is_found() -> None:
    class WithNumpy(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(np.random.rand())

    class WithPython(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(random.random())

    class WithItsOwn(Augmented):
        transforms = ()

        def __init__(self) -> None:
            self.transforms = [{"noise": np.random.default_rng(0)}]

        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("fetching would move its generator")

    before = torch.get_rng_state()
    assert all(draws_random_numbers(d) for d in (Augmented(), WithNumpy(), WithPython(), WithItsOwn(), Stream()))
    assert torch.equal(torch.get_rng_state(), before)
    assert not draws_random_numbers(Heavy())


def refusal(step: Step, settings: dict[str, Any]) -> str:
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(step, Option("loader", "", "bitwise", settings))
    return str(caught.value)


def test_refusals_say_why() -> None:
    plain = made(lambda: with_loader(TensorDataset(torch.arange(8.0))))
    assert refusal(Step(plain.model, plain.loss, plain.optimizer, plain.batch), {"num_workers": 0}) == (
        "This step has no torch DataLoader to change: hand it over as Step(…, loader=loader)."
    )
    assert refusal(with_loader(Augmented(), num_workers=2), {"num_workers": 0}) == (
        "Augmented draws random numbers for its samples, and another number of workers draws others: allow redrawn, or keep the workers."
    )
    assert refusal(with_loader(Stream(), num_workers=2), {"num_workers": 0}) == (
        "Stream hands out its samples itself, by the number of workers, so another number would give other batches: keep the workers, "
        "and fetch fewer batches ahead."
    )


def test_nothing_is_offered_without_workers() -> None:
    assert LEVER.options(simulated(with_loader(Heavy(), batch_size=4))) == ()


def cached(copies: list[int] | None = None, **settings: Any) -> Step:
    data = pytest.importorskip("monai.data")
    transforms = pytest.importorskip("monai.transforms")

    def load(index: int) -> torch.Tensor:
        if copies is not None:
            copies.append(index)
        return torch.full((MIB,), float(index))

    dataset = data.CacheDataset([*range(8)], transforms.Compose([Load(load)]), progress=False, num_workers=1)
    return with_loader(dataset, batch_size=4, **settings)


def Load(call: Any) -> Any:  # a deterministic transform of MONAI's kind
    from monai.transforms import Transform

    class Called(Transform):  # type: ignore[misc]
        def __call__(self, value: int) -> torch.Tensor:
            return call(value)  # type: ignore[no-any-return]

    return Called()


def test_a_smaller_cache_gives_the_same_samples() -> None:
    made_again: list[int] = []
    step = cached(made_again)
    before = simulated(step)
    assert before.process.cached_bytes == 8 * 4 * MIB
    options = {o.name: o for o in LEVER.options(before)}
    assert list(options) == ["half of the cache", "no cache"]
    plain = epochs(step)
    made_again.clear()
    with LEVER.apply(step, options["half of the cache"]):
        predicted = LEVER.rewrite(before, options["half of the cache"])
        assert epochs(step) == plain and sorted(made_again) == [4, 4, 5, 5, 6, 6, 7, 7]
        assert predicted.process.cached_bytes == simulated(step).process.cached_bytes == 4 * 4 * MIB
        assert predicted.process_bytes == before.process_bytes - 4 * 4 * MIB
    made_again.clear()
    assert epochs(step) == plain and sorted(made_again) == [4, 5, 6, 7]  # taken in again, once
    assert "TensorDataset has no cache of samples" in refusal(with_loader(TensorDataset(torch.zeros(4))), {"cache": 0.5})


def test_neither_workers_nor_a_cache() -> None:
    step = cached(num_workers=2)
    before, plain = simulated(step), epochs(step)
    option = LEVER.options(before)[-1]
    assert option.name == "no workers, no cache" and step.loader is not None
    with LEVER.apply(step, option):
        after = simulated(step).process
        assert (after.workers, after.cached_bytes) == (0, 0) and epochs(step) == plain
    told = LEVER.rewrite(before, option).process
    assert (told.workers_bytes, told.cached_bytes, told.base_bytes) == (0, 0, before.process.base_bytes - 8 * 4 * MIB)
    assert (step.loader.num_workers, epochs(step)) == (2, plain)  # type: ignore[attr-defined]
