"""Random numbers of a batch in parts: draws that are hard to tell apart, or beside a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit import Step
from memfit.levers import LEVERS
from memfit.records import Option
from quick_ledgers import seen

LEVER = LEVERS["microbatch"]
Draw = Callable[[torch.Tensor], torch.Tensor]


def seeded(*size: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7), **kwargs)


def alike_but_for_shape(x: torch.Tensor) -> torch.Tensor:
    return (x + seeded(len(x), 6, dtype=x.dtype)) * seeded(len(x), 1, dtype=x.dtype)


def alike_but_for_dtype(x: torch.Tensor) -> torch.Tensor:
    return (x + seeded(len(x), 6)) * seeded(len(x), 6, dtype=x.dtype)


def seeded_again(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    first = torch.rand(len(x), 6, dtype=x.dtype)
    torch.manual_seed(3)
    return x * first + torch.rand(len(x), 1, dtype=x.dtype)


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(123)
        noise = torch.randn(len(x), 6, dtype=x.dtype)
    return F.dropout(x + noise, 0.5)


def step_of(draw: Draw) -> Step:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()
    batch = torch.randn(5, 6, dtype=torch.float64)
    return Step(net, lambda m, x: m[1](draw(m[0](x))).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.0), batch)


def ran(step: Step) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(5)
    step.run(step.batch)
    return [p.grad for p in step.models[""].parameters() if p.grad is not None], torch.get_rng_state()


def options(draw: Draw) -> list[Option]:
    return list(LEVER.options(seen(step_of(draw))))


def assert_the_same(draw: Draw) -> None:
    expected, state = ran(step_of(draw))
    for option in options(draw):
        assert option.exactness == "reordered"
        step = step_of(draw)
        with LEVER.apply(step, option):
            got, got_state = ran(step)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(got_state, state)


@pytest.mark.parametrize("draw", [alike_but_for_shape, alike_but_for_dtype, seeded_again])
def test_draws_from_equal_states_are_told_apart(draw: Draw) -> None:
    assert_the_same(draw)


def test_a_fork_of_the_generator_leaves_later_draws_alone() -> None:
    assert_the_same(forked)
