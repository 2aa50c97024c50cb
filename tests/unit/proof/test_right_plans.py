"""Right plans pass, on every kind of step, and nothing is left changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memfit import Step, verify
from memfit.proof.shelf import same_bits
from memfit.records import Verdict
from memfit.step.batches import tensors_in
from memfit.step.running import Running
from small_levers import CHECKPOINT, FUSED, NOTHING, RIGHT, SPLIT, WRONG, SmallLever, plan_of
from small_steps import SMALL_STEPS, dense, transformer

SEPARABLE = [name for name in SMALL_STEPS if name not in ("convolutional_2d", "transformer")]  # BatchNorm; dropout


def judged(step: Step, *levers: SmallLever, **options: Any) -> Verdict:
    return verify(step, plan_of(step, *levers), levers={lever.name: lever for lever in levers}, **options)


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_recomputing_keeps_every_bit(name: str) -> None:
    verdict = judged(SMALL_STEPS[name](), NOTHING, CHECKPOINT)
    assert verdict.equivalent and verdict.exactness == "bitwise" and not verdict.culprit and not verdict.notes
    assert verdict.worst.error == verdict.worst.bound == 0.0
    assert verdict.trajectory["reference"] == verdict.trajectory["fitted"] and len(verdict.trajectory["fitted"]) == 3


@pytest.mark.parametrize("name", SEPARABLE)
def test_micro_batches_are_the_same_up_to_rounding(name: str) -> None:
    verdict = judged(SMALL_STEPS[name](), CHECKPOINT, SPLIT)
    assert verdict.equivalent and verdict.exactness == "reordered" and not verdict.notes  # float64 could be had
    assert verdict.worst.bound


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_a_fused_optimizer_is_the_same_up_to_rounding(name: str) -> None:
    verdict = judged(SMALL_STEPS[name](), FUSED)
    assert verdict.equivalent and not verdict.notes


def test_dropout_with_the_same_masks_passes_against_float64() -> None:
    """The float64 run gets the masks of the float32 one: without that, it would be another step altogether."""
    assert judged(transformer(dropout=0.3), CHECKPOINT, FUSED).equivalent


@pytest.mark.parametrize("seed", [2, 3])
def test_long_sums_of_signs_are_held_to_what_their_order_does_to_the_plain_step(seed: int) -> None:
    """The gradient of a bias under an L1 loss: 55 296 equal terms that nearly cancel, and the plain step's order was a lucky one."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv3d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv3d(32, 1, 3, padding=1))
    step = Step(net, lambda m, x: (m(x) - x).abs().mean(), torch.optim.AdamW(net.parameters()), torch.randn(4, 1, 24, 24, 24))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert judged(step, SPLIT).equivalent and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_what_was_compared_is_counted() -> None:
    verdict = judged(SMALL_STEPS["convolutional_2d"](), CHECKPOINT)
    assert verdict.compared == {"gradients": 8, "buffers": 3, "rng": 3, "optimizer_state": 8, "parameters": 8}
    assert verdict.levers == ("checkpoint",) and verdict.loss["reference"] == verdict.loss["fitted"] is not None


def test_sums_that_threads_race_for_do_not_spoil_a_comparison_of_bits() -> None:
    """torch adds to a table of positions in any order, unless it is told not to."""
    net, index, weights = nn.Module(), torch.randint(0, 64, (100_000,)), torch.randn(100_000, 8)
    net.table = nn.Parameter(torch.randn(64, 8))
    step = Step(net, lambda m, x: (m.table[index] * weights).sum() * x.mean(), torch.optim.SGD([net.table], 1e-4), torch.ones(2, 2))
    assert all(judged(step, NOTHING).equivalent and not judged(step, NOTHING).notes for _ in range(2))

    def gradient() -> torch.Tensor:
        step.optimizers[0].zero_grad()
        step.loss(net, step.batch).backward()
        return net.table.grad

    if torch.get_num_threads() > 1:  # the race is real
        assert not all(torch.equal(gradient(), gradient()) for _ in range(10))


def test_a_verdict_survives_its_file(tmp_path: Any) -> None:
    verdict = judged(SMALL_STEPS["two_phases"](), SPLIT)
    verdict.save(tmp_path / "verdict.json")
    assert Verdict.load(tmp_path / "verdict.json") == verdict
    assert set(verdict.trajectory["fitted"][0]) == {"generator", "critic"}


def everything(step: Step) -> dict[str, torch.Tensor]:
    found = {f"{prefix}.{name}": t for prefix, m in step.models.items() for name, t in m.state_dict(keep_vars=True).items()}
    found |= {f"grad {name}": t.grad for name, t in found.items() if t.grad is not None}
    found |= {f"state {n} {path}": t for n, o in enumerate(step.optimizers) for path, t in tensors_in(dict(enumerate(o.state.values())))}
    return found | dict(tensors_in(step.batch)) | {"rng": torch.get_rng_state()}


def about(step: Step) -> Any:
    modules = [module for model in step.models.values() for module in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules]
    on_parameters = [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for m in modules for p in m.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for o in step.optimizers for g in o.param_groups]
    flags = [(m.training, *sorted(vars(m))) for m in modules]
    of_torch = torch.get_default_dtype(), torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    return hooks, on_parameters, copy.deepcopy(groups), flags, random.getstate(), str(np.random.get_state()), of_torch


@pytest.mark.parametrize("name", SMALL_STEPS)
@pytest.mark.parametrize(
    "levers", [(CHECKPOINT, FUSED), (NOTHING, WRONG["weakened"], FUSED), (WRONG["raising"],)], ids=["right", "wrong", "raising"]
)
def test_everything_is_left_as_it_was(name: str, levers: tuple[SmallLever, ...]) -> None:
    step = SMALL_STEPS[name]()
    step.run(step.batch)  # there are states and gradients to lose
    objects, before = everything(step), {key: t.detach().clone() for key, t in everything(step).items()}
    before_about = about(step)
    judged(step, *levers)
    after = everything(step)
    assert after.keys() == before.keys()
    assert all(after[key] is objects[key] for key in objects if key != "rng")
    assert all(same_bits(after[key].detach(), before[key]) for key in before)
    assert about(step) == before_about and step.running == Running()


def test_the_check_for_changes_can_fail() -> None:
    step = dense()
    before = {key: t.detach().clone() for key, t in everything(step).items()}
    step.run(step.batch)
    assert not all(same_bits(t.detach(), before[key]) for key, t in everything(step).items() if key in before)


def test_each_right_lever_is_blameless_beside_a_wrong_one() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(5, 8))
    assert judged(step, *RIGHT).equivalent
    assert judged(step, *RIGHT, WRONG["weakened"]).culprit == "weakened"
