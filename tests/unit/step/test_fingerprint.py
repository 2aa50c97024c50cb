from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fresh_process import in_a_fresh_process
from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.step import device_of
from memfit.step.fingerprint import differences, fingerprint
from small_steps import SMALL_STEPS, dense, two_phases


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_a_step_built_twice_has_one_fingerprint(name: str) -> None:
    first, second = fingerprint(SMALL_STEPS[name]()), fingerprint(SMALL_STEPS[name]())
    assert first == second and not differences(first, second)
    assert all(isinstance(value, str) for value in first.values())


def test_training_does_not_change_it() -> None:
    step = two_phases()
    before = fingerprint(step)
    step.run(step.batch)
    assert fingerprint(step) == before


def changed(**what: object) -> list[str]:
    step = dense()
    return differences(fingerprint(step), fingerprint(replace(step, **what)))


def test_another_batch_is_told() -> None:
    assert changed(batch=torch.randn(8, 64)) == ["batch: float32 [32, 64] when planned, float32 [8, 64] now"]


def test_where_a_step_is_built_does_not_change_what_it_is() -> None:
    here, there = (made_on(device) for device in ("cpu", "meta"))
    assert device_of(there) == "meta" and fingerprint(here) == fingerprint(there)


def made_on(device: str) -> Step:
    net = nn.Linear(4, 4, device=device)
    return Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4, device=device))


def test_builds_of_one_torch_for_several_devices_are_one_torch() -> None:
    assert "+" not in fingerprint(dense())["torch"]
    assert differences({"torch": "2.9.0"}, {"torch": "2.9.1"}) == ["torch: 2.9.0 when planned, 2.9.1 now"]


def test_what_only_looks_like_a_build_or_a_device_is_told() -> None:
    assert changed(clip_grad_norm=1e6) and differences(
        fingerprint(replace(dense(), clip_grad_norm=1e6)), fingerprint(replace(dense(), clip_grad_norm=1e7))
    )


def test_another_optimizer_is_told() -> None:
    step = dense()
    other = replace(step, optimizer=torch.optim.SGD(step.models[""].parameters(), 0.1))
    assert differences(fingerprint(step), fingerprint(other)) == [
        "training: AdamW of 4 parameters (weight_decay) when planned, SGD of 4 parameters now"
    ]


def test_a_changed_layer_is_named_and_so_is_a_frozen_one() -> None:
    step, frozen = dense(), dense()
    frozen.models[""][0].requires_grad_(False)
    (told,) = differences(fingerprint(step), fingerprint(frozen))
    assert told.startswith("model.0: 2 tensors, 16,640 values, 16,640 trained, digest ") and " 0 trained" in told
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False))
    other = Step(net, step.loss, torch.optim.AdamW(net.parameters()), step.batch)
    assert [line.split(":")[0] for line in differences(fingerprint(step), fingerprint(other))] == [
        "model.2",
        "model.2's modules",
        "training",
    ]


def test_a_shape_that_keeps_its_size_is_seen_by_the_digest() -> None:
    steps = []
    for shape in ((4, 2), (2, 4)):
        net = nn.Module()
        net.weight = nn.Parameter(torch.ones(shape))
        steps.append(Step(net, lambda m, b: m.weight.sum() * b.mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(1, 1)))
    (told,) = differences(*map(fingerprint, steps))
    assert "model.weight" in told


class Block(nn.Module):
    """A module of a user's own."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), activation, nn.BatchNorm1d(32))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def mean_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def made(
    activation: Callable[[], nn.Module] = nn.GELU, loss: Callable[..., Any] = mean_of_squares, weight: Any = None, **options: Any
) -> Step:
    net = Block(activation())
    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1, **options), torch.ones(8, 16), weight=weight)


def told(other: Step) -> list[str]:
    return differences(fingerprint(made()), fingerprint(other))


def test_another_activation_is_told_though_it_holds_no_tensor() -> None:
    (line,) = told(made(nn.Tanh))
    assert line.startswith("model.layers's modules: 1 Sequential, 1 Linear, 1 GELU, 1 BatchNorm1d, digest ") and "1 Tanh" in line
    (line,) = told(made(lambda: nn.GELU("tanh")))  # the same kinds, set in another way
    assert line.startswith("model.layers's modules: ")
    net = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.0))
    step = Step(net, mean_of_squares, torch.optim.SGD(net.parameters(), 0.1), torch.ones(8, 16))
    before = fingerprint(step)
    net[1].p = 0.5
    assert differences(before, fingerprint(step)) == [
        "model.1's modules: Dropout(p=0.0, inplace=False) when planned, Dropout(p=0.5, inplace=False) now"
    ]


def test_a_layer_put_in_another_mode_is_told() -> None:
    frozen = made()
    frozen.models[""].layers[2].eval()
    (line,) = told(frozen)
    assert line.startswith("model.layers's modules: ") and ", evaluating 1 of 4, digest " in line.partition("when planned")[2]
    evaluating = made()
    evaluating.models[""].eval()
    assert told(evaluating) == ["model: Block, training when planned, Block, evaluating now"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 0.9}, "(momentum)"),
        ({"foreach": True}, "(foreach)"),
        ({"foreach": False}, "(not foreach)"),
        ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "(momentum, nesterov, weight_decay)"),
    ],
)
def test_options_that_change_what_an_optimizer_keeps_or_runs_are_told(options: dict[str, Any], words: str) -> None:
    assert told(made(**options)) == [f"training: SGD of 6 parameters when planned, SGD of 6 parameters {words} now"]


def test_groups_of_parameters_with_options_of_their_own_are_told() -> None:
    step = made()
    block = step.models[""]
    groups = [{"params": block.layers.parameters()}, {"params": block.last.parameters(), "weight_decay": 0.1}]
    other = replace(step, optimizer=torch.optim.SGD(groups, 0.1))
    assert told(other) == ["training: SGD of 6 parameters when planned, SGD of 4 parameters and 2 parameters (weight_decay) now"]


def test_another_loss_is_told() -> None:
    def halved(body: str) -> Step:
        file: dict[str, Any] = {"torch": torch, "__name__": "theirs"}
        exec(f"def helper(y):\n    {body}\ndef loss(model, x):\n    return helper(model(x))\n", file)
        return made(loss=file["loss"])

    def autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_of_squares(model, x)

    (line,) = told(made(loss=autocast))
    assert line.startswith("loss: mean_of_squares, code ") and ".autocast, code " in line
    squares, commented, absolute = (
        halved(body) for body in ("return y.pow(2).mean()", "# why\n    return y.pow(2).mean()", "return y.abs()")
    )
    assert not differences(fingerprint(squares), fingerprint(commented))
    (line,) = differences(fingerprint(squares), fingerprint(absolute))  # not the loss, a function of its file that it calls
    assert line.startswith("loss: loss, code ")


def test_losses_that_are_no_plain_functions_are_told_apart() -> None:
    class Scaled:
        def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).mean()

        def method(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).sum()

    losses = (Scaled(), Scaled().method, functools.partial(mean_of_squares), torch.no_grad()(mean_of_squares))
    facts = [fingerprint(made(loss=loss))["loss"] for loss in losses]
    assert facts[2] == facts[3] == fingerprint(made())["loss"] and len(set(facts)) == 3
    assert "Scaled, code " in facts[0] and "Scaled.method, code " in facts[1]


def test_what_a_users_module_does_is_told_by_its_class() -> None:
    class Other(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    Other.__name__ = Other.__qualname__ = "Block"
    other = made()
    other.models[""].__class__ = Other
    (line,) = told(other)
    assert line.startswith("code of Block: ")


def test_a_weight_is_told() -> None:
    (line,) = told(made(weight=lambda batch: 1.0))
    assert line.startswith("weight: not there when planned, ")


def test_code_that_another_python_compiled_is_compared_by_its_name() -> None:
    then, now = {"loss": "mean, code 12345678 of Python 3.11"}, {"loss": "mean, code 87654321 of Python 3.12"}
    assert not differences(then, now) and differences(then, {"loss": "mean, code 87654321 of Python 3.11"})
    assert differences(then, {"loss": "other, code 87654321 of Python 3.12"})


def test_what_training_moves_is_no_difference() -> None:
    step = made(momentum=0.9)
    before = fingerprint(step)
    schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizers[0], 0.1, total_steps=9)  # moves the momentum as well
    for _ in range(3):
        step.run(step.batch)
        schedule.step()
    again = made(momentum=0.9)
    again.models[""].load_state_dict(step.models[""].state_dict())
    again.optimizers[0].load_state_dict(step.optimizers[0].state_dict())
    assert not differences(before, fingerprint(step)) and not differences(before, fingerprint(again))


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_a_step_built_without_memory_is_the_same(name: str) -> None:
    assert not differences(fingerprint(SMALL_STEPS[name]()), fingerprint(built_without_memory(SMALL_STEPS[name])))


def test_a_step_of_another_process_is_the_same() -> None:
    there = in_a_fresh_process(
        "import json; from small_steps import SMALL_STEPS; from memfit.step.fingerprint import fingerprint\n"
        "print(json.dumps({name: fingerprint(make()) for name, make in SMALL_STEPS.items()}))"
    )
    assert not [line for name, make in SMALL_STEPS.items() for line in differences(there[name], fingerprint(make()))]
