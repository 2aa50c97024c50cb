"""What a step counts and collects by itself, in models and optimizers, is as it was after a look at it."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step


@dataclass
class Notes:
    """A helper that a model or an optimizer keeps."""

    calls: int = 0
    seen: list[int] = field(default_factory=list)
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(3))

    def take(self) -> None:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean += 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.notes, self.plain = nn.Linear(4, 1), Notes(), {"nested": [deque([1], maxlen=2), Notes()]}
        self.last, self.by_name, self.counter = deque([0], maxlen=3), defaultdict(list, {"a": [1]}), Counter(x=2)
        self.ordered = OrderedDict(b=1, a=2)
        self.array, self.matrix = np.zeros(3), np.asfortranarray(np.zeros((2, 3)))[1:]
        self.fixed, self.objects = np.zeros(2), np.array([None, "text"])
        self.fixed.flags.writeable = False
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.append(len(self.last))
        self.by_name["b"].append(1)
        self.by_name["a"].append(2)
        self.counter.update("xyz")
        self.ordered.move_to_end("b")
        self.ordered["c"] = 3
        self.notes.take()
        self.plain["nested"][0].append(2)
        self.plain["nested"][1].take()  # type: ignore[attr-defined]
        self.array += 1
        self.matrix[0, 1] += 1
        return self.inner(x)  # type: ignore[no-any-return]


class CountingSGD(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.t, self.history, self.notes, self.own = 0, [0], Notes(), torch.zeros(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.t += 1
        self.history.append(self.t)
        self.notes.take()
        self.own += 1
        for state in (self.state[p] for group in self.param_groups for p in group["params"]):
            state.setdefault("norms", [1.0]).append(2.0)


class Wrapping(torch.optim.SGD):
    """Around another, whose state is not its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = CountingSGD(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def counting(kind: type[Any]) -> Step:
    net = Counting()
    return Step(net, lambda m, b: m(b).pow(2).mean(), kind(net.parameters()), torch.ones(2, 4))


def told(step: Step) -> str:
    """All of it, in words."""
    net, optimizer = step.models[""], step.optimizers[0]
    held = {k: v for k, v in net.__dict__.items() if k in Counting().__dict__.keys() - {"_modules", "lock", "training"}}
    own = getattr(optimizer, "base", optimizer)
    states = {str(p.shape): s for p, s in own.state.items()}
    return repr((held, list(net.inner.parameters()), own.t, own.history, own.notes, own.own, states, own.param_groups))


@pytest.mark.parametrize("kind", [CountingSGD, Wrapping])
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_what_a_step_collects_is_as_it_was(simulate: bool, trained: int, kind: type[Any]) -> None:
    step = counting(kind)
    for _ in range(trained):
        step.run(step.batch)
    before, deep, states = told(step), copy.copy(step.models[""].__dict__), list(step.optimizers[0].state.values())
    memfit.profile(step, simulate=simulate)
    assert told(step) == before
    assert all(step.models[""].__dict__[name] is value for name, value in deep.items())
    assert all(now is then for now, then in zip(step.optimizers[0].state.values(), states, strict=True))
    step.run(step.batch)
    assert told(step) != before  # the comparison can fail


class Streaming:
    """Has an iterator, which nobody can put back: its place must not be put back either."""

    def __init__(self) -> None:
        self.place, self.stream = 0, iter(range(1000))

    def draw(self) -> None:
        assert next(self.stream) == self.place
        self.place += 1


class Frozen(dict[str, int]):
    """A kind of its own, which may not like to be refilled."""

    def clear(self) -> None:
        raise TypeError("frozen")


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.streaming, self.frozen, self.stream = Streaming(), Frozen(), self._numbers()

    def _numbers(self) -> Iterator[int]:
        yield from range(1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.streaming.draw()
        self.frozen["calls"] = next(self.stream)
        return super().forward(x)


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_what_cannot_be_put_back_stays_as_it_is_and_works_on(simulate: bool) -> None:
    net = Drawing()
    step = Step(net, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4))
    memfit.profile(step, simulate=simulate)
    step.run(step.batch)
    assert net.streaming.place == net.frozen["calls"] + 1
