"""A real profile perturbs nothing, whatever happens in it."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step, kept_bits, restoring
from memfit.capture.rollback import rolled_back
from memfit.step.batches import map_tensors, tensors_in
from small_steps import SMALL_STEPS, convolutional_2d


def everything(step: Step) -> dict[str, Any]:
    """All that training changes, copied."""
    state: dict[str, Any] = {"rng": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1].copy()}
    for prefix, model in step.models.items():
        state |= {f"{prefix}.{k}": v.clone() for k, v in model.state_dict().items()}
        state |= {f"{prefix}.{k}.grad": None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    for number, optimizer in enumerate(step.optimizers):
        state[f"optimizer{number}"] = map_tensors(torch.clone, optimizer.state_dict())
    state |= {path: tensor.clone() for path, tensor in tensors_in(step.batch)}
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("make", SMALL_STEPS.values(), ids=SMALL_STEPS)
def test_a_profile_changes_nothing(make: Callable[[], Step], trained: int, simulate: bool) -> None:
    step = make()
    for _ in range(trained):
        step.run(step.batch)
    before, objects = everything(step), [id(p) for m in step.models.values() for p in m.parameters()]
    memfit.profile(step, simulate=simulate)
    assert same(before, everything(step))
    assert objects == [id(p) for m in step.models.values() for p in m.parameters()]


def test_the_comparison_above_can_fail() -> None:
    """A step that is run and not rolled back differs: in parameters, BatchNorm's counter, the optimizer, and the random state."""
    step = convolutional_2d()
    before = everything(step)
    step.run(step.batch)
    torch.rand(1)
    after = everything(step)
    changed = {key for key in before if not same(before[key], after[key])}
    assert {"rng", ".0.weight", ".0.weight.grad", ".1.num_batches_tracked", ".1.running_mean", "optimizer0"} <= changed


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_put_back_after_an_exception(error: type[BaseException]) -> None:
    step = convolutional_2d()
    step.run(step.batch)
    before = everything(step)
    with pytest.raises(error), rolled_back(step):
        step.run(step.batch)
        raise error("in the middle")
    assert same(before, everything(step))


def test_everything_is_put_back_before_ctrl_c_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    step = convolutional_2d()
    step.run(step.batch)
    before, put_back = everything(step), kept_bits._put_back

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        put_back(*args)

    monkeypatch.setattr(kept_bits, "_put_back", interrupted)
    with pytest.raises(KeyboardInterrupt), rolled_back(step):
        step.run(step.batch)
    assert same(before, everything(step))


def test_a_simulation_puts_everything_back_before_ctrl_c_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    step = convolutional_2d()
    step.run(step.batch)
    before, refill = everything(step), restoring._refill

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        refill(*args)

    monkeypatch.setattr(restoring, "_refill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memfit.profile(step, simulate=True)
    assert same(before, everything(step))
    assert type(step.models[""](step.batch["image"])) is torch.Tensor


def test_a_full_disk_is_found_before_anything_is_changed() -> None:
    step = convolutional_2d()
    step.run(step.batch)
    before, gradients = everything(step), [p.grad for p in step.models[""].parameters()]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), rolled_back(step):
            step.run(step.batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(before, everything(step))
    assert all(p.grad is g for p, g in zip(step.models[""].parameters(), gradients, strict=True))


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
def test_hooks_and_tensors_are_restored_when_the_users_code_raises(simulate: bool) -> None:
    net = nn.Linear(4, 4)
    weights = [id(p) for p in net.parameters()]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch)
        raise ValueError("the user's own")

    step = Step(net, loss, torch.optim.Adam(net.parameters()), torch.ones(2, 4))
    groups, state = step.optimizers[0].param_groups, step.optimizers[0].state
    with pytest.raises(ValueError, match="the user's own"):
        memfit.profile(step, simulate=simulate)
    assert weights == [id(p) for p in net.parameters()] == [id(p) for p in step.optimizers[0].param_groups[0]["params"]]
    assert step.optimizers[0].param_groups is groups and step.optimizers[0].state is state and not state
    assert type(net(torch.ones(1, 4))) is torch.Tensor
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())  # type: ignore[attr-defined]


def test_gradients_that_were_there_stay_the_same_objects() -> None:
    step = convolutional_2d()
    step.run(step.batch)
    gradients = [p.grad for p in step.models[""].parameters()]
    memfit.profile(step)
    assert all(p.grad is g for p, g in zip(step.models[""].parameters(), gradients, strict=True))
