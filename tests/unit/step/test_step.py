from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import Phase, Step, StepError


def loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def net_and_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), 0.1)


def faults(*args: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(StepError) as caught:
        Step(*args, **options)
    return caught.value.faults


def test_all_faults_are_told_together() -> None:
    net, _ = net_and_sgd()
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), 0.1)
    told = faults(net, loss, stranger, {"x": torch.zeros(0, 4), "y": torch.zeros(2, 4)})
    assert len(told) == 2
    assert "SGD holds none of the model's parameters" in told[0]
    assert "the batch is empty" in told[1]


def test_some_parameters_that_are_not_in_the_model() -> None:
    net, _ = net_and_sgd()
    both = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(7))], 0.1)
    assert "holds 1 tensors that are not in the model (shapes (7,))" in faults(net, loss, both, torch.zeros(2, 4))[0]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(0, 4), "the batch is empty"),
        ({}, "without a tensor in it"),
        (["a", 3], "without a tensor in it"),
        (None, "no batch was given"),
        (torch.zeros(2, 4, device="meta"), "the model is on cpu and the batch on meta"),
    ],
)
def test_bad_batches(batch: Any, words: str) -> None:
    assert words in faults(*(net_and_sgd()[0], loss), net_and_sgd()[1], batch)[-1]


def test_wrong_kinds_of_parts() -> None:
    told = faults("a model", None, None, torch.zeros(2, 4))
    assert told[0].startswith("model is a str") and told[1].startswith("loss is None") and told[2].startswith("optimizer is None")


def test_a_loss_that_cannot_be_called_with_model_and_batch() -> None:
    net, optimizer = net_and_sgd()
    assert "cannot be called as loss(model, batch)" in faults(net, lambda model: model, optimizer, torch.zeros(2, 4))[0]


def test_an_optimizer_that_needs_a_closure() -> None:
    net, _ = net_and_sgd()
    assert faults(net, loss, torch.optim.LBFGS(net.parameters()), torch.zeros(2, 4))[0].startswith("LBFGS evaluates the loss several times")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_grad_norm": "1"}, "clip_grad_norm is a str: give the largest norm"),
        ({"clip_grad_norm": True}, "clip_grad_norm is a bool: give the largest norm"),
        ({"clip_grad_norm": 0}, "clip_grad_norm is 0: give the largest norm"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is nan: give the largest norm"),
        ({"scheduler": 3}, "the scheduler is a int, which has no step()"),
        ({"scheduler": ["linear"]}, "the scheduler is a str, which has no step()"),
        ({"weight": 3}, "weight is a int: give a function weight(batch)"),
    ],
)
def test_wrong_kinds_of_what_comes_between_gradients_and_the_next_step(options: dict[str, Any], words: str) -> None:
    net, optimizer = net_and_sgd()
    assert faults(net, loss, optimizer, torch.zeros(2, 4), **options)[0].startswith(words)


def test_a_scheduler_that_wants_to_be_told_the_loss_is_refused_before_a_weight_moves() -> None:
    """Profile and proof run without schedulers, so it would first fail in training, after the optimizer's step."""
    net, optimizer = net_and_sgd()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    (told,) = faults(net, loss, optimizer, torch.zeros(2, 4), scheduler=plateau)
    assert told.startswith(
        "the scheduler (ReduceLROnPlateau) wants to be told something at each step (missing a required argument: 'metrics')"
    )
    assert "call it in your own loop" in told
    phase = Phase("a", lambda models, batch, carry: loss(models, batch), optimizer, clip_grad_norm=-1.0, scheduler=[plateau])
    told, more = faults(net, phases=[phase], batch=torch.zeros(2, 4))
    assert told.startswith("clip_grad_norm of phase 'a' is -1.0") and more.startswith("the scheduler of phase 'a' (ReduceLROnPlateau)")


def test_schedulers_of_every_other_kind_are_taken() -> None:
    net, optimizer = net_and_sgd()
    kinds = torch.optim.lr_scheduler
    warm, later = kinds.LinearLR(optimizer), kinds.CosineAnnealingLR(optimizer, 3)
    schedulers = [
        kinds.SequentialLR(optimizer, [warm, later], [1]),
        kinds.OneCycleLR(optimizer, 0.1, 5),
        kinds.CosineAnnealingWarmRestarts(optimizer, 2),
    ]
    assert (
        Step(net, loss, optimizer, torch.zeros(2, 4), scheduler=schedulers, clip_grad_norm=1, weight=len).all_phases[0].clip_grad_norm == 1
    )


def test_phases_exclude_a_loss_and_need_names_of_their_own() -> None:
    net, optimizer = net_and_sgd()
    phase = Phase("a", lambda models, batch, carry: loss(models, batch), optimizer)
    assert "two phases share a name" in faults(net, phases=[phase, phase], batch=torch.zeros(2, 4))[0]
    assert "both phases and a loss" in faults(net, loss, phases=[phase], batch=torch.zeros(2, 4))[0]


@pytest.mark.parametrize("simulate", [True, False])
@pytest.mark.parametrize(
    ("bad_loss", "words"),
    [
        (lambda model, batch: model(batch), "has shape (2, 2), not a scalar"),
        (lambda model, batch: model(batch).detach().mean(), "does not depend on any trainable parameter"),
        (lambda model, batch: 3.0, "returned a float"),
    ],
)
def test_a_loss_with_a_wrong_value_is_found_when_first_run(bad_loss: Any, words: str, simulate: bool) -> None:
    net, optimizer = net_and_sgd()
    step = Step(net, bad_loss, optimizer, torch.zeros(2, 4))
    with pytest.raises(StepError, match="This step cannot be trained") as caught:
        memfit.profile(step, simulate=simulate)
    assert words in str(caught.value)


class Explodes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.0


@pytest.mark.parametrize("where", ["module", "loss"])
def test_a_loss_that_is_not_finite_names_the_module(where: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Explodes() if where == "module" else nn.Identity(), nn.Linear(4, 1))
    before = [p.clone() for p in net.parameters()]

    def a_loss(model: Any, batch: Any) -> torch.Tensor:
        value = model(batch).sum()
        return value if where == "module" else value / 0.0

    step = Step(net, a_loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4))
    with pytest.raises(StepError) as caught:
        memfit.profile(step)
    expected = "first appears in the output of 1 (Explodes)" if where == "module" else "comes from the loss function itself"
    assert expected in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_run_is_a_plain_training_step() -> None:
    """zero_grad, loss, backward, clip, step, scheduler: the same bits as by hand."""
    torch.manual_seed(1)
    ours, batch = nn.Linear(4, 2), torch.randn(8, 4)
    theirs = nn.Linear(4, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer, by_hand = (torch.optim.AdamW(n.parameters(), 0.1) for n in (ours, theirs))
    scheduler, other = (torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, by_hand))
    step = Step(ours, loss, optimizer, batch, clip_grad_norm=0.01, scheduler=scheduler)
    for _ in range(3):
        step.run(batch)
        by_hand.zero_grad()
        loss(theirs, batch).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        by_hand.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert scheduler.get_last_lr() == other.get_last_lr() == [0.0125]
