"""Which steps get no micro-batches and no chunks: forward passes that change a model's state, or look at the batch as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import Step
from memfit.levers import LEVERS
from quick_ledgers import seen


class Averaging(nn.Module):
    """Keeps a moving average of what it gives, in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y  # type: ignore[no-any-return]


class Following(nn.Module):
    """A copy of weights that follows them slowly, as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.inner(x) - self.slow(x)  # type: ignore[no-any-return]


class Standing(nn.Module):
    """Makes a mask on its first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.arange(4.0)
        return self.inner(x) * self.mask  # type: ignore[no-any-return]


class Functional(nn.Module):
    """A batch norm written by hand."""

    def __init__(self, training: bool, statistics: bool) -> None:
        super().__init__()
        self.inner, self.whole = nn.Linear(4, 4), training
        self.register_buffer("mean", torch.zeros(4) if statistics else None)
        self.register_buffer("variance", torch.ones(4) if statistics else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(self.inner(x), self.mean, self.variance, training=self.whole)


def added_up_by_lists() -> nn.Module:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._foreach_add_([self.calls], 1.0)
            return super().forward(x)

    return Counting()


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral norm as a parametrization": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "a buffer that is set anew": Averaging,
    "weights that follow others": Following,
    "buffers in a list": added_up_by_lists,
    "a functional batch norm": lambda: Functional(True, True),
    "a functional batch norm without statistics": lambda: Functional(True, False),
}
DIVISIBLE: dict[str, Callable[[], nn.Module]] = {
    "a functional batch norm that only uses its statistics": lambda: Functional(False, True),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(4, 4)),
    "instance norm with weights": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "a buffer that is only read": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()),
}


def divided(model: nn.Module) -> Step:
    return Step(model, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(model.parameters(), 0.1), torch.randn(6, 4))


def chunked(model: nn.Module) -> Step:
    both = nn.ModuleDict({"first": nn.Linear(4, 4), "second": model})

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return memfit.chunked(lambda z: m["second"](z).pow(2).mean(), m["first"](x), parameters=m["second"])

    return Step(both, loss, torch.optim.SGD(both.parameters(), 0.1), torch.randn(6, 4))


@pytest.mark.parametrize(("lever", "step"), [("microbatch", divided), ("chunk", chunked)])
@pytest.mark.parametrize("name", WHOLE)
def test_no_options_where_a_part_would_be_another_training(name: str, lever: str, step: Callable[[nn.Module], Step]) -> None:
    assert LEVERS[lever].options(seen(step(WHOLE[name]()))) == []


@pytest.mark.parametrize(("lever", "step"), [("microbatch", divided), ("chunk", chunked)])
@pytest.mark.parametrize("name", DIVISIBLE)
def test_options_where_samples_do_not_meet(name: str, lever: str, step: Callable[[nn.Module], Step]) -> None:
    assert LEVERS[lever].options(seen(step(DIVISIBLE[name]())))


@pytest.mark.parametrize("simulate", [True, False])
def test_a_buffer_made_once_is_no_buffer_that_changes(simulate: bool) -> None:
    assert LEVERS["microbatch"].options(memfit.profile(divided(Standing()), simulate=simulate))
    assert not LEVERS["microbatch"].options(memfit.profile(divided(Averaging()), simulate=simulate))


def test_a_buffer_that_is_set_anew_costs_no_more_than_one_that_stays() -> None:
    measured, predicted = (memfit.profile(divided(Averaging()), simulate=simulate) for simulate in (False, True))
    assert measured.peak_bytes == predicted.peak_bytes


def picked(by: torch.Tensor, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
    net = nn.Linear(4, 4)
    batch = {"x": torch.randn(6, 4), "by": by}
    return Step(net, lambda m, b: loss(m(b["x"]), b["by"]).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)


def test_no_micro_batches_of_a_graph_whose_edges_pick_among_its_nodes() -> None:
    edges = torch.randint(0, 6, (2, 9))
    for loss in (
        lambda y, e: y.index_add(0, e[1], y[e[0]]),
        lambda y, e: y.index_select(0, e[0] * 1),
        lambda y, e: y.gather(0, e[0][:, None].expand(-1, 4)),
    ):
        assert LEVERS["microbatch"].options(seen(picked(edges, loss))) == []


def test_micro_batches_where_every_sample_is_picked_from_alike() -> None:
    assert LEVERS["microbatch"].options(seen(picked(torch.tensor([3, 1, 0]), lambda y, columns: y[:, columns])))
    assert LEVERS["microbatch"].options(seen(picked(torch.randint(0, 4, (6, 1)), lambda y, classes: y.gather(1, classes))))
    assert LEVERS["microbatch"].options(seen(picked(torch.tensor([3, 1, 0]), lambda y, rows: y + torch.arange(4.0)[rows].mean())))
