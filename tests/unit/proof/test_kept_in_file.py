"""A plain step that does not fit the limit is still compared with: what autograd keeps of it waits in a file."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn

import memfit
from fresh_process import in_a_fresh_process
from memfit.proof.fitting_sample import sample_inside
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.limit import Limit
from memfit.step import Step
from small_levers import CHECKPOINT, plan_of


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
