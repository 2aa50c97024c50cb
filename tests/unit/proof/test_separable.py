"""Whether a batch may be divided is found by dividing a few samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit import Step
from memfit.proof.separable import why_not_separable
from memfit.records import Option

DROPOUT = {"": [["aten.bernoulli_.float", [6, 8], []]] * 2}


def dropping(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(model(F.dropout(x, 0.5)), 0.5).pow(2).mean()


def option(draws: Any = None, exactness: str = "reordered") -> Option:
    return Option("microbatch", "", exactness, {"size": 3, "batch": 6, "draws": draws or {}, "again": False})


def step_of(loss: Any, weight: Any = None, outside: nn.Module | None = None) -> Step:
    net = nn.Linear(8, 8)
    return Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(6, 8), weight=weight)


def contrastive(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(model(x), dim=1), F.normalize(x, dim=1)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(x)))


def test_means_are_separable_also_with_dropout() -> None:
    assert why_not_separable(step_of(lambda m, x: m(x).pow(2).mean()), option()) == ""
    assert why_not_separable(step_of(dropping), option(DROPOUT)) == ""


def test_other_dropout_masks_are_found() -> None:
    assert "do not give the gradients they give together" in why_not_separable(step_of(dropping), option())
    assert why_not_separable(step_of(dropping), option(exactness="redrawn")) == ""


def test_a_contrastive_loss_is_named() -> None:
    told = why_not_separable(step_of(contrastive), option())
    assert "the loss compares samples with each other (a contrastive loss, statistics of the whole batch)" in told
    assert "Step.weight" in told


def test_a_sum_is_told_from_a_comparison() -> None:
    assert "the loss is a sum over the batch, not a mean" in why_not_separable(step_of(lambda m, x: m(x).pow(2).sum()), option())


def test_a_network_with_batch_statistics_that_only_the_loss_holds() -> None:
    judge = nn.BatchNorm1d(8)
    told = why_not_separable(step_of(lambda m, x: judge(m(x)).pow(3).mean()), option())
    assert "fails on a single sample, where 4 together work (ValueError: Expected more than 1 value per channel" in told


@pytest.mark.parametrize(("weight", "right"), [(None, False), (lambda x: float((x > 0).sum()), True)])
def test_a_mean_over_something_else_needs_its_weight(weight: Any, right: bool) -> None:
    told = why_not_separable(step_of(lambda m, x: (m(x) * (x > 0)).sum() / (x > 0).sum(), weight), option())
    assert (told == "") is right


def test_everything_is_put_back() -> None:
    step = step_of(contrastive)
    before, state = [p.clone() for p in step.models[""].parameters()], torch.get_rng_state()
    why_not_separable(step, option())
    assert all(torch.equal(a, b) for a, b in zip(before, step.models[""].parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state()) and step.running.split is None and not step.optimizers[0].state
