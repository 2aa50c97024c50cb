"""A lever that is right in the first step may spoil averages, counters or random numbers in a later one: the end of the last tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit import Step, verify
from memfit.levers import Undo
from memfit.records import Verdict
from small_levers import CHECKPOINT, FUSED, NOTHING, SmallLever, _around, _averaged_twice, _counted_twice, plan_of
from small_steps import convolutional_2d


@contextmanager
def _half(step: Step) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def _one_draw_more(step: Step) -> Iterator[None]:
    yield
    torch.rand(1)


def in_the_last_step(name: str, context: Callable[[Step], AbstractContextManager[None]]) -> SmallLever:
    """Of three steps."""

    def act(step: Step, undo: Undo) -> None:
        count = [0]

        @contextmanager
        def later(step: Step) -> Iterator[None]:
            count[0] += 1
            if count[0] % 3:
                yield
            else:
                with context(step):
                    yield

        _around(later)(step, undo)

    return SmallLever(name, "bitwise", act)


HALF = SmallLever("half", "rounded", _around(_half))
WRONG = {
    "averaged": (in_the_last_step("averaged", _averaged_twice), ".running_mean after the last step"),
    "counted": (in_the_last_step("counted", _counted_twice), ".num_batches_tracked after the last step"),
    "drawn": (in_the_last_step("drawn", _one_draw_more), "the state of torch's random numbers after the last step"),
}


def judged(step: Step, *levers: SmallLever) -> Verdict:
    return verify(step, plan_of(step, *levers), levers={lever.name: lever for lever in levers})


def with_adam() -> Step:
    """A bias before BatchNorm has a gradient of nothing but rounding, of which Adam makes whole steps: averages get to feel them."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU())]
    net = nn.Sequential(*layers)
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), torch.optim.Adam(net.parameters(), 0.01), torch.randn(4, 3, 16, 16))


@pytest.mark.parametrize("beside", [CHECKPOINT, FUSED, HALF], ids=lambda lever: lever.exactness)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_the_last_step_alone_is_caught(name: str, beside: SmallLever) -> None:
    wrong, what = WRONG[name]
    swallowed = name == "averaged" and beside is not CHECKPOINT  # by what Adam makes of rounding: a right plan may be off as far
    for make in (convolutional_2d,) if swallowed else (convolutional_2d, with_adam):
        verdict = judged(make(), NOTHING, beside, wrong)
        assert not verdict.equivalent and verdict.culprit == name and what in verdict.worst.what


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("right", [FUSED, HALF], ids=lambda lever: lever.exactness)
def test_what_optimizers_make_of_rounding_fails_no_right_plan(seed: int, right: SmallLever) -> None:
    torch.manual_seed(seed)
    assert judged(with_adam(), right).equivalent


def test_of_other_random_numbers_only_counters_are_compared() -> None:
    redrawn = replace(NOTHING, exactness="redrawn", name="redrawn")
    assert judged(convolutional_2d(), redrawn, replace(WRONG["drawn"][0], exactness="redrawn")).by_design
    assert judged(convolutional_2d(), replace(WRONG["counted"][0], exactness="redrawn")).culprit == "counted"
