"""Every run of a proof stays inside what it was given: the plain step, its float64 and noisy runs, and the batches of its steps."""

from __future__ import annotations

import platform

import pytest

from fresh_process import in_a_fresh_process

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the high-water mark is reset and read as Linux does")

SETUP = """
import json, torch, memfit, memfit.proof
from dataclasses import replace
from memfit.capture.process import HighWaterMark
from memfit.records import PlannedLever
from small_levers import NOTHING, plan_of

STEPS = 1

def step_of(net, *shape, optimizer=torch.optim.SGD):
    return memfit.Step(net, lambda m, x: m(x[..., :128]).pow(2).mean(), optimizer(net.parameters(), 0.1), torch.randn(shape))

def proven(step, exactness, limit):
    with HighWaterMark() as mark:
        verdict = memfit.verify(step, plan_of(step, lever := replace(NOTHING, exactness=exactness)), steps=STEPS, limit_bytes=limit,
                                levers={lever.name: lever})
    return [verdict.equivalent, mark.bytes, limit, verdict.samples]

def high(step):
    memfit.profile(step, simulate=True)  # the first simulation brings libraries into the process, as importing the proof does
    return memfit.profile(step, simulate=True).process_high_bytes
"""

KEEPS_ITS_RESULTS = """
net = torch.nn.Sequential(*(layer for _ in range(7) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())))
"""


def test_what_rounding_does_is_measured_where_there_is_room_for_it() -> None:
    """tanh keeps its result, and moved by a last bit, for the layer that follows, it is there twice."""
    script = "step = step_of(net, 67584, 128)\nprint(json.dumps(proven(step, 'rounded', high(step) + (24 << 20))))"
    equivalent, held, limit, samples = in_a_fresh_process(SETUP + KEEPS_ITS_RESULTS + script)
    assert equivalent and held <= limit and samples < 67584


def test_a_single_sample_is_moved_with_what_autograd_keeps_in_a_file() -> None:
    script = "step = step_of(net, 1, 67584, 128)\nprint(json.dumps(proven(step, 'rounded', high(step) + (24 << 20))))"
    equivalent, held, limit, samples = in_a_fresh_process(SETUP + KEEPS_ITS_RESULTS + script)
    assert equivalent and held <= limit and samples == 1


def test_of_a_trajectorys_batches_two_are_in_memory_at_most() -> None:
    script = """
STEPS = 3
step = step_of(torch.nn.Linear(128, 1), 8, 1024, 5120)
print(json.dumps(proven(step, "bitwise", high(step) + (176 << 20))))
"""
    equivalent, held, limit, samples = in_a_fresh_process(SETUP + script)
    assert equivalent and held <= limit and samples == 8


def test_a_run_in_float64_stays_below_what_is_predicted_for_it() -> None:
    """What is exchanged for float64 is kept to be put back: parameters, and the states of a step that has been trained."""
    script = """
from memfit.proof.fitting_sample import Sample
from memfit.proof.needs import Needs
from memfit.proof.reference import Reference
step = step_of(torch.nn.Sequential(torch.nn.Linear(128, 72000), torch.nn.Linear(72000, 128)), 8, 128, optimizer=torch.optim.Adam)
step.run(step.batch)
most = Needs(step, "reordered").at_most(8)
with HighWaterMark() as mark:
    failure = Reference(Sample(step), 1).exact.failure
print(json.dumps([failure, mark.bytes, most]))
"""
    failure, held, most = in_a_fresh_process(SETUP + script)
    assert not failure and held <= most
