"""`memfit.plan` itself on random networks: what it promises, seen on real steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step
from memfit.applying import apply_levers, apply_plan
from memfit.levers import LEVERS
from small_steps import sgd

MIB = 2**20
KINDS = {
    "linear": lambda: nn.Linear(128, 128),
    "wide": lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)),
    "norm": lambda: nn.LayerNorm(128),
    "tanh": nn.Tanh,
    "relu_": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.2),
}
NETWORKS = st.lists(st.sampled_from(sorted(KINDS)), min_size=4, max_size=7)
SHARES = st.floats(0.3, 0.9)
PATIENT = [HealthCheck.filter_too_much, HealthCheck.too_slow]
rarely = settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=PATIENT)


def made(kinds: list[str]) -> Step:
    """Results of 16 MiB each: enough to show beside what an interpreter takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 128), *(KINDS[kind]() for kind in kinds), nn.Linear(128, 1))
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(32768, 16))


def budget_of(step: Step, share: float) -> int:
    """A share of what the plain step takes above what stays whatever is done."""
    plain = memfit.profile(step, simulate=True)
    fixed = plain.process_high_bytes - plain.peak_bytes
    return int(fixed + share * plain.peak_bytes)


def too_small_for(step: Step) -> int:
    """A budget that the plain step leaves even if its process takes the least it may."""
    return memfit.profile(step, simulate=True).process_low_bytes - 64 * MIB


def planned(step: Step, budget: int, *words: str) -> memfit.Plan | None:
    try:
        return memfit.plan(step, budget, levers={word: LEVERS[word] for word in words or ("saved", "microbatch")})
    except memfit.Infeasible:
        return None


@rarely
@given(NETWORKS, SHARES)
def test_a_larger_budget_never_gives_a_slower_plan(kinds: list[str], share: float) -> None:
    step = made(kinds)
    budget = budget_of(step, share)
    slowdowns = [plan.predicted_slowdown for more in (0, 24, 80) if (plan := planned(step, budget + more * MIB, "saved"))]
    assert slowdowns == sorted(slowdowns, reverse=True)  # type: ignore[type-var]


@rarely
@given(NETWORKS)
def test_a_budget_above_the_need_gives_the_empty_plan(kinds: list[str]) -> None:
    step = made(kinds)
    plan = memfit.plan(step, memfit.profile(step, simulate=True).process_high_bytes + 32 * MIB)
    assert plan.levers == () and plan.predicted_slowdown == 1.0 and plan.exactness == "bitwise"


@rarely
@given(NETWORKS, SHARES)
def test_the_measured_peak_of_an_applied_plan_is_inside(kinds: list[str], share: float) -> None:
    step = made(kinds)
    plan = planned(step, budget_of(step, share))
    if plan is not None:
        with apply_plan(step, plan):
            measured = memfit.profile(step)
        assert measured.peak_bytes <= 1.02 * plan.predicted_peak_bytes


def test_a_plan_without_its_levers_would_be_noticed() -> None:
    step = made(["wide", "tanh", "wide", "norm", "wide"])
    plan = planned(step, budget_of(step, 0.4))
    assert plan is not None and plan.levers
    with apply_levers(step, ()):
        assert memfit.profile(step).peak_bytes > 1.02 * plan.predicted_peak_bytes


LIMITED = """
import json, resource, sys
import psutil, torch
sys.path[:0] = json.loads(sys.argv[1])
import memfit
from memfit.applying import apply_plan
from test_plans import made, planned, too_small_for

step = made(["wide", "tanh", "wide", "norm", "wide", "wide", "tanh", "wide", "wide"])
if sys.argv[3] == "planned":  # in a process like those that will run it
    planned(step, too_small_for(step), "saved").save(sys.argv[2])
    raise SystemExit
plan = memfit.Plan.load(sys.argv[2])
assert plan.levers
if sys.argv[3] == "fitted":
    apply_plan(step, plan)
taken = psutil.Process().memory_info()
limit = plan.budget_bytes + taken.vms - taken.rss
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for _ in range(3):
    step.run(step.batch)
print("survived")
"""


def run_limited(plan_file: Path, way: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    arguments = [sys.executable, "-c", LIMITED, json.dumps(paths), str(plan_file), way]
    one_arena = os.environ | {"MALLOC_ARENA_MAX": "1"}  # each new thread would reserve 64 MiB of address space, which is no memory
    return subprocess.run(arguments, capture_output=True, text=True, env=one_arena)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_under_a_hard_limit_the_fitted_step_lives_and_the_plain_one_dies(tmp_path: Path) -> None:
    """The limit is the budget, and beside it what a process only reserves: address space that is not in memory at the start."""
    run_limited(tmp_path / "plan.json", "planned").check_returncode()
    fitted, plain = (run_limited(tmp_path / "plan.json", way) for way in ("fitted", "plain"))
    assert fitted.stdout == "survived\n", fitted.stderr[-2000:]
    assert plain.returncode and "can't allocate memory" in plain.stderr
