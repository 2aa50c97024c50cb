from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit import Step
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
    assert not differences({"torch": "2.9.0+cpu"}, {"torch": "2.9.0"}) and differences({"torch": "2.9.0"}, {"torch": "2.9.1"})


def test_what_only_looks_like_a_build_or_a_device_is_told() -> None:
    assert changed(clip_grad_norm=1e6) and differences(
        fingerprint(replace(dense(), clip_grad_norm=1e6)), fingerprint(replace(dense(), clip_grad_norm=1e7))
    )


def test_another_optimizer_is_told() -> None:
    step = dense()
    other = replace(step, optimizer=torch.optim.SGD(step.models[""].parameters(), 0.1))
    assert differences(fingerprint(step), fingerprint(other)) == ["training: AdamW of 4 parameters when planned, SGD of 4 parameters now"]


def test_a_changed_layer_is_named_and_so_is_a_frozen_one() -> None:
    step, frozen = dense(), dense()
    frozen.models[""][0].requires_grad_(False)
    (told,) = differences(fingerprint(step), fingerprint(frozen))
    assert told.startswith("model.0: 2 tensors, 16,640 values, 16,640 trained, digest ") and " 0 trained" in told
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False))
    other = Step(net, step.loss, torch.optim.AdamW(net.parameters()), step.batch)
    assert [line.split(":")[0] for line in differences(fingerprint(step), fingerprint(other))] == ["model.2", "training"]


def test_a_shape_that_keeps_its_size_is_seen_by_the_digest() -> None:
    steps = []
    for shape in ((4, 2), (2, 4)):
        net = nn.Module()
        net.weight = nn.Parameter(torch.ones(shape))
        steps.append(Step(net, lambda m, b: m.weight.sum() * b.mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(1, 1)))
    (told,) = differences(*map(fingerprint, steps))
    assert "model.weight" in told
