"""Rows of samples under dropout: replayed where a sample's rows follow one another, refused where samples take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import Step
from memfit.levers import LEVERS, CannotApply

LEVER = LEVERS["microbatch"]


def two_views(samples: int, channels: int) -> Step:
    """Dropout on [all of one view, all of the other]: a sample's two rows do not follow one another."""
    net = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.Dropout2d(0.3), nn.Conv2d(channels, 3, 3, padding=1))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        one, two = model(torch.cat([batch["a"], batch["b"]])).chunk(2)
        return F.mse_loss(one, batch["a"]) + 2 * F.mse_loss(two, batch["b"])

    batch = {view: torch.randn(samples, 3, 8, 8) for view in "ab"}
    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), batch)


def test_rows_in_which_samples_take_turns_are_not_replayed_though_another_dimension_is_as_long_as_the_batch() -> None:
    step = two_views(8, 6)
    assert LEVER.options(memfit.profile(step, simulate=True))[0].exactness == "redrawn"
    step = two_views(8, 8)  # now the channels could be the samples
    option = LEVER.options(memfit.profile(step, simulate=True))[0]
    with LEVER.apply(step, option), pytest.raises(CannotApply, match="is no part of a draw that was seen with the whole batch"):
        step.run(step.batch)


def time_first() -> Step:
    """Sequences of 16 steps, a batch of 4, time first: the first dimension is a multiple of the batch, the second holds the samples."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
    batch = torch.randn(4, 16, 8)
    return Step(net, lambda m, x: m(x.transpose(0, 1).contiguous()).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)


def test_time_that_is_a_multiple_of_the_batch_is_not_taken_for_rows() -> None:
    torch.manual_seed(0)
    step = time_first()
    option = LEVER.options(memfit.profile(step, simulate=True))[0]
    assert option.exactness == "reordered"
    gradients = []
    for applied in (False, True):
        undo = LEVER.apply(step, option) if applied else None
        torch.manual_seed(1)
        step.model.zero_grad()  # type: ignore[union-attr]
        step.differentiate(step.all_phases[0], step.batch)
        gradients.append([p.grad.clone() for p in step.model.parameters() if p.grad is not None])  # type: ignore[union-attr]
        if undo:
            undo()
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)
