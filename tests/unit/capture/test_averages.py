"""An average of the weights that a hook on the optimizer's step keeps is rolled back with the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import memfit
from memfit import Step

Kept = Callable[[], list[torch.Tensor]]


class Average:
    """As programs write it themselves."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.shadow, self.steps = net, {n: p.detach().clone() for n, p in net.named_parameters()}, torch.zeros(1)

    def update(self, *_: Any) -> None:
        self.steps += 1
        for name, parameter in self.net.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    __call__ = update


def of_torch(net: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    average = AveragedModel(net)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(net))
    return lambda: [t.clone() for t in average.state_dict().values()]


def with_hook(hook: Callable[[Average], Any]) -> Callable[[nn.Module, torch.optim.Optimizer], Kept]:
    def made(net: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
        average = Average(net)
        optimizer.register_step_post_hook(hook(average))
        return lambda: [t.clone() for t in (*average.shadow.values(), average.steps)]

    return made


WAYS = {
    "torch's own": of_torch,
    "a method": with_hook(lambda average: average.update),
    "an object": with_hook(lambda average: average),
    "a partial": with_hook(lambda average: partial(Average.update, average)),
    "a closure": with_hook(lambda average: lambda *_: average.update()),
}


def looked_at(step: Step, how: str) -> None:
    if how == "verify":
        memfit.verify(step, memfit.plan(step, "8GiB"))
    else:
        memfit.profile(step, simulate=how == "simulated")


@pytest.mark.parametrize("how", ["real", "simulated", "verify"])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_that_a_hook_keeps_is_as_it_was(way: str, how: str) -> None:
    net = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    kept = WAYS[way](net, optimizer)
    step = Step(net, lambda m, b: m(b).pow(2).mean(), optimizer, torch.ones(8, 16))
    step.run(step.batch)
    before, weights = kept(), copy.deepcopy(net.state_dict())
    looked_at(step, how)
    assert all(type(now) is torch.Tensor and torch.equal(now, then) for now, then in zip(kept(), before, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(net.state_dict().values(), weights.values(), strict=True))
    step.run(step.batch)
    assert not all(torch.equal(now, then) for now, then in zip(kept(), before, strict=True))  # the comparison can fail
