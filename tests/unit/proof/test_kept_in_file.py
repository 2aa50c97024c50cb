"""A plain step that does not fit the limit is still compared with: what autograd keeps of it waits in a file."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from fresh_process import in_a_fresh_process
from memfit.proof.fitting_sample import sample_inside
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.limit import Limit
from memfit.step import Step
from small_levers import CHECKPOINT, WRONG, plan_of


def deep(samples: int = 1) -> Step:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())]
    net = nn.Sequential(*layers)
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(samples, 16, 224, 224))


def test_the_bits_are_the_same_and_memory_is_less() -> None:
    plain, filed = deep(), deep()
    with kept_in_file(filed):
        assert memfit.profile(filed).peak_bytes < 0.6 * memfit.profile(plain).peak_bytes
        expected, got = plain.run(plain.batch)[""], filed.run(filed.batch)[""]
    assert torch.equal(expected, got) and filed.running.around_loss == []
    for a, b in zip(plain.models[""].parameters(), filed.models[""].parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


HELD = """
import json, torch, memfit
from memfit.capture.process import HighWaterMark
from memfit.proof.kept_in_file import kept_in_file
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())]
net = torch.nn.Sequential(*layers)
step = memfit.Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(32768, 128))
with kept_in_file(step):
    most = memfit.profile(step, simulate=True).process_high_bytes
    with HighWaterMark() as mark:
        for _ in range(6):
            step.run(step.batch)
print(json.dumps([most, mark.bytes]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is told to give blocks back at once")
def test_the_process_holds_no_more_than_is_predicted() -> None:
    """In malloc's heap these blocks of 16 MiB left 280 MB of holes, and 120 were the most that was predicted."""
    most, held = in_a_fresh_process(HELD)
    assert held < most


def between() -> int:
    """A limit that one plain sample does not fit, but fits with a file."""
    filed = deep()
    with kept_in_file(filed):
        low = memfit.profile(filed, simulate=True).process_high_bytes
    return (low + memfit.profile(deep(), simulate=True).process_high_bytes) // 2


def test_it_is_the_last_resort_and_said() -> None:
    step = deep(2)
    assert not sample_inside(step, Limit(8 << 30), exactness="bitwise").in_file
    sample = sample_inside(step, Limit(between()), exactness="bitwise")
    assert sample.in_file and any("waited in a file" in note for note in sample.notes)
    with pytest.raises(memfit.MemfitError, match=r"iB, and [\d.]+ .iB with what .* in a file.* Give a larger --budget"):
        sample_inside(step, Limit(1 << 20), exactness="bitwise")


def test_a_plan_is_proven_that_way() -> None:
    step = deep()
    verdict = memfit.verify(step, plan_of(step, CHECKPOINT), limit_bytes=between(), levers={"checkpoint": CHECKPOINT}, steps=2)
    assert verdict.equivalent and any("waited in a file" in note for note in verdict.notes)


BLAMED = """
import json, sys, torch, memfit
from dataclasses import replace
from memfit.capture.process import HighWaterMark
from memfit.levers import LEVERS
from memfit.proof.kept_in_file import kept_in_file
from small_levers import WRONG, plan_of
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())]
net = torch.nn.Sequential(*layers)
step = memfit.Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(1, 67584, 128))
limit = memfit.profile(step, simulate=True).process_high_bytes - (150 << 20)
saved = memfit.plan(step, limit - (60 << 20), levers={"saved": LEVERS["saved"]}).levers
wrong = WRONG[NAME]
plan = plan_of(step, wrong)
plan = replace(plan, levers=(*saved, *plan.levers))
with HighWaterMark() as mark:
    verdict = memfit.verify(step, plan, steps=2, limit_bytes=limit, levers={**LEVERS, wrong.name: wrong})
print(json.dumps([verdict.samples, verdict.equivalent, verdict.culprit, mark.bytes, limit]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is told to give blocks back at once")
@pytest.mark.parametrize("name", ["slower", "weakened"])
def test_the_lever_to_blame_is_found_inside_the_limit(name: str) -> None:
    """Without the table of saved tensors the step is as large as the plain one; a hook on a parameter cannot be simulated."""
    samples, equivalent, culprit, held, limit = in_a_fresh_process(f"NAME = {name!r}\n" + BLAMED)
    assert samples == 1 and not equivalent and culprit == name
    assert held <= limit


def test_levers_that_only_fit_together_are_not_tried_apart() -> None:
    step = deep()
    slower, weakened = WRONG["slower"], WRONG["weakened"]
    hooked = [replace(weakened, name=name) for name in ("one", "two")]
    verdict = memfit.verify(step, plan_of(step, *hooked), limit_bytes=between(), levers={lever.name: lever for lever in hooked}, steps=1)
    assert not verdict.equivalent and not verdict.culprit
    assert any("without some of them the step is not predicted to fit the limit" in note for note in verdict.notes)
    verdict = memfit.verify(step, plan_of(step, slower), limit_bytes=between(), levers={"slower": slower}, steps=1)
    assert verdict.culprit == "slower" and any("of the fitted step, beside what its levers see to" in note for note in verdict.notes)
