"""Random numbers of a batch in parts: draws that are hard to tell apart, or beside a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import Step
from memfit.capture.unwatched import run_unwatched
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


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (3, 2)).flatten(0, 1)


def rows_by_time(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (3, 2)).transpose(0, 1).flatten(0, 1)


def back(drawn: torch.Tensor) -> torch.Tensor:
    return drawn.unflatten(0, (-1, 3)).flatten(1)


def back_from_time(drawn: torch.Tensor) -> torch.Tensor:
    return drawn.unflatten(0, (3, -1)).transpose(0, 1).flatten(1)


def windowed(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention of three windows a sample, to two places each."""
    windows = rows(x)[:, None, :, None].expand(-1, heads, -1, 4).contiguous()
    return back(F.dropout((windows @ windows.mT).softmax(-1), 0.5).sum((1, 3)))


SAMPLE_BY_SAMPLE: dict[str, Draw] = {
    "dropout": lambda x: back(F.dropout(rows(x), 0.5)),
    "dropout of a product": lambda x: back(F.dropout(rows(x) @ torch.ones(2, 2, dtype=x.dtype), 0.5)),
    "dropout of the rows' transpose": lambda x: back(F.dropout(rows(x).t(), 0.5).t()),
    "noise": lambda x: back(rows(x) + torch.randn_like(rows(x))),
    "noise of a size": lambda x: back(rows(x) * (1 + torch.rand(3 * len(x), 1, dtype=x.dtype))),
    "windows, as many heads as samples": lambda x: windowed(x, 5),
    "heads before time": lambda x: F.dropout(x.view(1, len(x) * 3, 2).transpose(0, 1), 0.5).transpose(0, 1).reshape(len(x), 6),
}
ALTERNATING: dict[str, Draw] = {
    "dropout": lambda x: back_from_time(F.dropout(rows_by_time(x), 0.5)),
    "dropout of a product": lambda x: back_from_time(F.dropout(rows_by_time(x) @ torch.ones(2, 2, dtype=x.dtype), 0.5)),
    "dropout of the rows' transpose": lambda x: back_from_time(F.dropout(rows_by_time(x).t(), 0.5).t()),
    "noise of a size": lambda x: back_from_time(rows_by_time(x) * torch.rand(3 * len(x), 1, dtype=x.dtype)),
    "joined": lambda x: back_from_time(F.dropout(torch.cat([x[:, :2], x[:, 2:4], x[:, 4:]]), 0.5)),
    "stacked": lambda x: back_from_time(F.dropout(torch.stack([x[:, :2], x[:, 2:4], x[:, 4:]]).flatten(0, 1), 0.5)),
    "as many steps as samples": lambda x: F.dropout(x.expand(5, -1, -1).flatten(0, 1), 0.5).unflatten(0, (5, -1)).sum(0),
    "repeated": lambda x: F.dropout(x.repeat(3, 1), 0.5).unflatten(0, (3, -1)).sum(0),
}


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


@pytest.mark.parametrize("name", SAMPLE_BY_SAMPLE)
def test_rows_that_follow_one_another_sample_by_sample_are_replayed(name: str) -> None:
    assert_the_same(SAMPLE_BY_SAMPLE[name])


@pytest.mark.parametrize("name", ALTERNATING)
def test_rows_in_which_samples_take_turns_are_redrawn_and_say_so(name: str) -> None:
    for option in options(ALTERNATING[name]):
        assert option.exactness == "redrawn" and "draws for rows in which samples may take turns" in option.why


def test_rows_of_a_chunk_in_which_samples_take_turns_are_redrawn() -> None:
    net = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 3)})

    def loss(draw: Draw) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        return lambda m, x: memfit.chunked(lambda z: m["second"](draw(z)).mean(), m["first"](x), parameters=m["second"])

    for kinds, exactness in ((SAMPLE_BY_SAMPLE, "reordered"), (ALTERNATING, "redrawn")):
        step = Step(net, loss(kinds["dropout"]), torch.optim.SGD(net.parameters(), 0.0), torch.randn(5, 6))
        assert {option.exactness for option in LEVERS["chunk"].options(seen(step))} == {exactness}


def test_what_replaying_keeps_is_predicted_to_the_byte() -> None:
    """States of generators are not among it: each is 5 KiB, and a simulation has none."""
    net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Tanh(), nn.Dropout(0.1), nn.Tanh(), nn.Dropout(0.1))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(512, 32))
    with LEVER.apply(step, LEVER.options(seen(step))[0]):
        assert run_unwatched(step).peak_bytes == memfit.profile(step, simulate=True).peak_bytes
