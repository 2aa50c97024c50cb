"""Losses that reach trained tensors by themselves: those are left as they were, count as what they are, or are refused."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import memfit
from memfit import MemfitError, Step


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def with_a_learned_variance(gradient: torch.Tensor | None) -> tuple[Step, nn.Parameter]:
    net, variance = nn.Linear(256, 256), nn.Parameter(torch.zeros(256, 256))
    variance.grad = gradient

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) @ torch.exp(-variance.t())).pow(2).mean() + variance.pow(2).mean()

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(8, 256)), variance


@pytest.mark.parametrize("there", [True, False], ids=["with a gradient", "without"])
@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_a_leaf_that_a_loss_holds_keeps_its_gradient(simulate: bool, there: bool) -> None:
    step, variance = with_a_learned_variance(torch.full((256, 256), 7.0) if there else None)
    gradient = variance.grad
    memfit.profile(step, simulate=simulate)
    assert variance.grad is gradient
    assert gradient is None or bool((gradient == 7).all())
    assert not step.running.saw_loss


def test_a_proof_leaves_it_as_it_was_too() -> None:
    step, variance = with_a_learned_variance(None)
    memfit.verify(step, memfit.plan(step, "8GiB"))
    assert variance.grad is None


def test_a_leaf_that_a_loss_holds_is_predicted_as_it_is_measured() -> None:
    step, _ = with_a_learned_variance(None)
    assert memfit.profile(step, simulate=True).peak_bytes == memfit.profile(step).peak_bytes


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_a_batch_that_gets_a_gradient_has_none_afterwards(simulate: bool) -> None:
    net, batch = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
    memfit.profile(Step(net, squares, torch.optim.SGD(net.parameters(), 0.1), batch), simulate=simulate)
    assert batch.grad is None


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_a_leaf_that_a_loss_makes_is_not_held(simulate: bool) -> None:
    """It would be in memory for longer than in the plain step."""
    net, made = nn.Linear(4, 1), list[weakref.ref[torch.Tensor]]()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert all(earlier() is None for earlier in made)
        leaf = torch.zeros(2, 4).requires_grad_()
        made.append(weakref.ref(leaf))
        return squares(model, batch + leaf)

    memfit.profile(Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4)), simulate=simulate)
    assert len(made) > 0


def with_decay(listed: bool) -> Step:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    before = list(net.parameters())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        parameters = before if listed else list(model.parameters())
        return squares(model, batch) + 1e-4 * torch.stack([p.pow(2).sum() for p in parameters]).sum()

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4))


def test_parameters_that_a_loss_has_listed_are_refused_by_name_where_tensors_are_exchanged() -> None:
    step = with_decay(listed=True)
    with pytest.raises(MemfitError, match=r"uses the parameter '\d\.(weight|bias)' from a variable of its own") as refused:
        memfit.plan(step, "8GiB")
    assert "as in model.parameters()" in str(refused.value)
    assert all(p.grad is None and type(p) is nn.Parameter for p in step.models[""].parameters())
    assert memfit.profile(step).peak_bytes == memfit.profile(with_decay(listed=False), simulate=True).peak_bytes
