"""A plain step that does not fit the limit is still compared with: what autograd keeps of it waits in a file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.proof.fitting_sample import sample_inside
from memfit.proof.kept_in_file import kept_in_file
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


def between() -> int:
    """A limit that one plain sample does not fit, but fits with a file."""
    filed = deep()
    with kept_in_file(filed):
        low = memfit.profile(filed, simulate=True).process_high_bytes
    return (low + memfit.profile(deep(), simulate=True).process_high_bytes) // 2


def test_it_is_the_last_resort_and_said() -> None:
    step = deep(2)
    assert not sample_inside(step, 8 << 30, wants_float64=False).in_file
    sample = sample_inside(step, between(), wants_float64=False)
    assert sample.in_file and any("waited in a file" in note for note in sample.notes)
    with pytest.raises(memfit.MemfitError, match="Give a larger --budget or --limit"):
        sample_inside(step, 1 << 20, wants_float64=False)


def test_a_plan_is_proven_that_way() -> None:
    step = deep()
    verdict = memfit.verify(step, plan_of(step, CHECKPOINT), limit_bytes=between(), levers={"checkpoint": CHECKPOINT}, steps=2)
    assert verdict.equivalent and any("waited in a file" in note for note in verdict.notes)
