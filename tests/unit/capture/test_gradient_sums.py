"""Gradients that meet: the first is added to where autograd alone holds it, as in a step that nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit import Step, profile
from memfit.capture.gradient_sums import lone_gradient
from memfit.capture.unwatched import run_unwatched

MEETING: dict[str, Callable[[Tensor], Any]] = {
    "slices": lambda y: sum(y[:, i].exp() for i in range(6)),
    "slices of a transposed tensor": lambda y: sum(y.t()[i].exp() for i in range(6)),
    "branches": lambda y: torch.stack([y.exp().sum(), y.sin().sum(), y.cos().sum(), y.sigmoid().sum()]),
    "passed on to two": lambda y: (y + y.sin()).exp() + y,
    "expanded": lambda y: y.sum(1, keepdim=True) + y.exp() + y[:, :1],
    "held by somebody": lambda y: _held(y.exp()) + _held(y.sin()) + y[:, 0:1] + y[:, 1:2],
    "twice the same": lambda y: (y * y).sum() + y[:, 0].sum() + y[:, 1].sum(),
    "sums in a backward written by hand": lambda y: _Summing.apply(y).sum() + y[:, 0].sum() + y[:, 1].sum(),
}


def _held(y: Tensor) -> Tensor:
    gradients: list[Tensor] = []
    y.register_hook(gradients.append)
    return y


class _Summing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient * 3 + gradient) + (x + gradient) + (gradient + x)


def meeting(kind: str) -> Step:
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    return Step(net, lambda m, x: MEETING[kind](m(x)).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(1000, 64))


@pytest.mark.parametrize("kind", MEETING)
def test_the_peak_is_the_one_of_a_step_that_nobody_watches(kind: str) -> None:
    truth = run_unwatched(meeting(kind)).peak_bytes
    assert profile(meeting(kind), simulate=True).peak_bytes == truth
    assert profile(meeting(kind)).peak_bytes == truth


def test_without_torchs_counts_of_references_every_sum_is_a_new_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    known = profile(meeting("slices"), simulate=True).peak_bytes
    monkeypatch.delattr("torch._C._storage_Use_Count")
    lone_gradient.cache_clear()
    try:
        assert lone_gradient() is None
        assert profile(meeting("slices"), simulate=True).peak_bytes > known
    finally:
        monkeypatch.undo()
        lone_gradient.cache_clear()
