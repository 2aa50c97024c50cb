"""saved: whatever is decided for whichever result, a step leaves the same bits behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from lever_law import differences, made
from memfit.levers import LEVERS
from memfit.levers.saved.table import BITS, CACHE, DISK, DROP, HOST, RECOMPUTE, TIMES
from quick_ledgers import seen
from saved_steps import STEPS, bits_after, large, line, plain_bits, spread, unlike

WORDS = [None, RECOMPUTE, *TIMES, DISK, HOST, BITS]


@pytest.fixture(autouse=True)
def _nothing_is_out_of_place() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("word", [RECOMPUTE, CACHE, DISK, BITS])
@pytest.mark.parametrize("name", STEPS)
def test_the_same_word_for_every_result(name: str, word: str) -> None:
    assert unlike(name, spread(name, [word])) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(STEPS)), st.lists(st.sampled_from(WORDS), min_size=1, max_size=7))
def test_any_table(name: str, words: list[str | None]) -> None:
    assert unlike(name, spread(name, words)) == []


@pytest.mark.parametrize("name", ["residual", "conjugated", "recurrent"])
def test_options(name: str) -> None:
    options = LEVERS["saved"].options(seen(made(STEPS[name])))
    assert "every block made again" in {option.name for option in options}
    for option in options:
        step = made(STEPS[name])
        with LEVERS["saved"].apply(step, option):
            assert differences(plain_bits(name), bits_after(step)) == [], option.name


@pytest.mark.parametrize("word", [None, RECOMPUTE, CACHE, DISK])
def test_inputs_that_nobody_reads_are_dropped(word: str | None) -> None:
    """The stand-in is not a number: a gradient that read it would show it."""
    name = "frozen_convolutions"
    ops = line(name).trace.ops
    frozen = {op: DROP for op in large(name) if ops[op].name == "aten.convolution.default" and ops[op].module.startswith("decoder")}
    assert len(frozen) == 3
    assert unlike(name, {**spread(name, [word]), **frozen}) == []


def test_an_input_that_is_read_is_never_dropped() -> None:
    name = "convolutional_2d"
    assert unlike(name, {op: DROP for op in large(name) if "convolution" in line(name).trace.ops[op].name}) == []


def test_the_comparison_sees_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.levers.saved import handles

    def almost(node: object) -> list[torch.Tensor]:
        return [t if not t.is_floating_point() else torch.nextafter(t, torch.full_like(t, torch.inf)) for t in remake(node)]

    remake = handles.remake
    monkeypatch.setattr(handles, "remake", almost)
    assert unlike("dense", spread("dense", [RECOMPUTE]))


def same_after_dropping(plain: memfit.Step, dropped: memfit.Step) -> None:
    """A step with the inputs dropped that nobody reads trains to the same bits."""
    options = LEVERS["saved"].options(memfit.profile(dropped, simulate=True))
    unread = next(option for option in options if option.name == "inputs nobody reads dropped")
    with LEVERS["saved"].apply(dropped, unread):
        dropped.run(dropped.batch)
    plain.run(plain.batch)
    for a, b in zip(plain.models[""].parameters(), dropped.models[""].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_dropped_input_leaves_its_order_of_memory_behind() -> None:
    def make() -> memfit.Step:
        torch.manual_seed(0)
        first, frozen = torch.nn.Linear(512, 512), torch.nn.Conv2d(512, 512, 1).requires_grad_(False)
        net = torch.nn.ModuleDict({"first": first, "frozen": frozen})

        def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
            channels_last = model["first"](x).transpose(1, 2).reshape(4, 512, 4, 4)
            return torch.sin(model["frozen"](channels_last)).mean()

        return memfit.Step(net, loss, torch.optim.SGD(first.parameters(), 0.1), torch.randn(4, 16, 512))

    same_after_dropping(make(), make())


class Behind(torch.nn.Module):
    """A frozen convolution right behind an operator that saves its own result, in one module."""

    def __init__(self, saves_its_result: Any) -> None:
        super().__init__()
        self.first, self.weight = saves_its_result, torch.nn.Parameter(torch.randn(4, 4, 3, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(self.first(x), self.weight)


@pytest.mark.parametrize("saves_its_result", [torch.relu, torch.sigmoid, torch.tanh])
def test_a_result_that_its_own_operator_reads_is_never_dropped(saves_its_result: Any) -> None:
    """The convolution saves the same tensor. Without the result, relu would let every gradient through."""

    def make() -> memfit.Step:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), Behind(saves_its_result))
        trained = torch.optim.SGD(net[0].parameters(), 0.1)
        return memfit.Step(net, lambda model, x: model(x).pow(2).mean(), trained, torch.randn(2, 3, 16, 16))

    same_after_dropping(make(), make())
