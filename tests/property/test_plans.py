"""`memfit.plan` itself on random networks: what it promises, seen on real steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from fresh_process import in_a_fresh_process
from memfit import Step
from memfit.fitting import planning
from memfit.fitting.plan_search import FoundPlan
from memfit.levers import LEVERS
from memfit.records import EXACTNESS
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
DEEP = ["wide", "tanh", "wide", "norm", "wide", "wide", "tanh", "wide", "wide"]
WORDS = ("saved", "microbatch", "allocator", "optimizer")
PATIENT = [HealthCheck.filter_too_much, HealthCheck.too_slow]
rarely = settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=PATIENT)


def made(kinds: list[str], samples: int = 32768) -> Step:
    """Results of 16 MiB each, however many samples that are: enough to show beside what an interpreter takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 128), *(KINDS[kind]() for kind in kinds), nn.Linear(128, 1))
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(samples, 32768 // samples, 16))


def budget_of(step: Step, share: float) -> int:
    """A share of what the plain step takes above what stays whatever is done."""
    plain = memfit.profile(step, simulate=True)
    fixed = plain.process_high_bytes - plain.peak_bytes
    return int(fixed + share * plain.peak_bytes)


def too_small_for(step: Step) -> int:
    """A budget that the plain step leaves even if its process takes the least it may."""
    return memfit.profile(step, simulate=True).process_low_bytes - 64 * MIB


def tight_for(step: Step) -> int:
    """A budget that leaves a part of a batch in four about what it takes, and the whole batch half of that."""
    plain = memfit.profile(step, simulate=True)
    return plain.process.base_bytes + plain.peak_bytes // 2


def found(step: Step, budget: int, *words: str) -> FoundPlan | None:
    try:
        return planning.find_plan(step, budget, levers={word: LEVERS[word] for word in words})
    except memfit.Infeasible:
        return None


def plan_of(step: Step) -> memfit.Plan | None:
    """For a budget that is too small for the plain step."""
    each = found(step, too_small_for(step), "saved", "microbatch")
    return each and each.plan


@rarely
@given(NETWORKS, st.lists(st.floats(0.1, 0.95), min_size=3, max_size=3, unique=True))
def test_a_larger_budget_never_gives_a_slower_plan(kinds: list[str], shares: list[float]) -> None:
    step = made(kinds)
    plans = [found(step, budget, *WORDS) for budget in sorted(budget_of(step, share) for share in shares)]
    slowdowns = [each.plan.predicted_slowdown for each in plans if each is not None]
    assert len(slowdowns) > 1 and slowdowns == sorted(slowdowns, reverse=True)  # type: ignore[type-var]
    assert all(later is not None for each, later in pairwise(plans) if each is not None)


@rarely
@given(NETWORKS)
def test_a_budget_above_the_need_gives_the_empty_plan(kinds: list[str]) -> None:
    step = made(kinds)
    plan = memfit.plan(step, memfit.profile(step, simulate=True).process_high_bytes + 32 * MIB)
    assert plan.levers == () and plan.predicted_slowdown == 1.0 and plan.exactness == "bitwise"


MEASURED = """
import json, sys
kinds, share, with_plan = json.loads({arguments!r})
import memfit
from memfit.fitting.applying import apply_plan
from memfit.capture.process import HighWaterMark
from memfit.levers.undo import Undo
from test_plans import WORDS, budget_of, found, made

step = made(kinds)
ours = found(step, budget_of(step, share), *WORDS)
assert ours is not None
with apply_plan(step, ours.plan) if with_plan else Undo():
    with HighWaterMark() as mark:
        for _ in range(6):
            step.run(step.batch)
    measured = memfit.profile(step)
print(json.dumps([measured.peak_bytes, ours.fitted.high_bytes, mark.bytes, ours.plan.budget_bytes]))
"""


def measured(kinds: list[str], share: float, with_plan: bool = True) -> tuple[int, int, int, int]:
    """Peak and the most predicted, process and budget: planned for and run in a process of its own."""
    peak, high, process, budget = in_a_fresh_process(MEASURED.format(arguments=json.dumps([kinds, share, with_plan])))
    return peak, high, process, budget


@settings(rarely, max_examples=2)
@given(NETWORKS, st.floats(0.15, 0.9))
def test_the_measured_peak_of_an_applied_plan_is_never_above_what_was_promised(kinds: list[str], share: float) -> None:
    peak, high, process, budget = measured(kinds, share)
    assert peak <= high and process <= budget


def test_a_plan_without_its_levers_would_be_noticed() -> None:
    peak, high, process, budget = measured(["wide", "tanh", "wide", "norm", "wide", "tanh", "wide"], 0.15, with_plan=False)
    assert peak > high and process > budget


def test_a_plan_tells_what_lost_what_could_be_reached_and_how_far_from_the_best_it_may_be() -> None:
    step = made(["wide", "tanh", "wide", "norm", "wide", "tanh"])
    plan = plan_of(step)
    assert plan is not None and plan.levers and all(lever.why for lever in plan.levers)
    assert plan.gap is not None and 0.0 <= plan.gap < 0.2
    assert plan.alternatives and all(lost.rejected_because for lost in plan.alternatives)
    reachable = [size for size in plan.reachable_bytes.values() if size is not None]
    assert len(reachable) == len(EXACTNESS) and reachable == sorted(reachable, reverse=True)
    assert plan.not_weighed == {} and reachable[-1] < plan.predicted_process_bytes
    assert memfit.Plan.from_dict(plan.to_dict()) == plan


def test_variants_that_nobody_would_take_are_not_simulated_for_a_plan() -> None:
    step = replace(made(["wide", "tanh", "wide", "norm"]), variants={"narrow": never_built})
    plan = plan_of(step)
    assert plan is not None and plan.levers and plan.reachable_bytes["altered"] is None and plan.reachable_bytes["rounded"] is not None
    assert plan.not_weighed == {"altered": "this step's variants are simulated only where altered is allowed"}


def test_what_takes_long_to_weigh_is_left_to_those_who_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.fitting.plan_search._MOST_OPS", 10)
    step = made(["wide", "tanh", "wide", "norm"])
    plan = plan_of(step)
    assert plan is not None and plan.reachable_bytes["reordered"] is not None and plan.estimated == ()
    assert set(plan.not_weighed) == {"redrawn", "rounded", "altered"} == {w for w, size in plan.reachable_bytes.items() if size is None}


def never_built() -> Step:
    raise AssertionError("a variant was built")


LIMITED = """
import json, resource, sys
import psutil
sys.path[:0] = json.loads(sys.argv[1])
import memfit
from memfit.fitting.applying import apply_plan
from memfit.levers import LEVERS
from test_plans import DEEP, found, made, tight_for, too_small_for

plan_file, way, words = sys.argv[2], sys.argv[3], sys.argv[4:]
step = made(DEEP, 32768 if words == ["saved"] else 4)
if way == "planned":  # in a process like those that will run it
    found(step, too_small_for(step) if words == ["saved"] else tight_for(step), *words).plan.save(plan_file)
    raise SystemExit
plan = memfit.Plan.load(plan_file)
assert {lever.name for lever in plan.levers} == set(words)
if way == "fitted":
    apply_plan(step, plan)
taken = psutil.Process().memory_info()
if way in ("by fit", "undone"):
    fitted = memfit.fit(step, plan.budget_bytes, levers={word: LEVERS[word] for word in words})
    assert fitted.plan.levers
    if way == "undone":
        fitted.undo()
limit = plan.budget_bytes + taken.vms - taken.rss
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for _ in range(3):
    fitted(step.batch) if way == "by fit" else step.run(step.batch)
print("survived")
"""


def run_limited(plan_file: Path, way: str, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    arguments = [sys.executable, "-c", LIMITED, json.dumps(paths), str(plan_file), way, *words]
    one_arena = os.environ | {"MALLOC_ARENA_MAX": "1"}  # each new thread would reserve 64 MiB of address space, which is no memory
    return subprocess.run(arguments, capture_output=True, text=True, env=one_arena)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize(
    ("words", "lives", "dies"),
    [(["saved"], "fitted", "plain"), (["saved", "microbatch"], "fitted", "plain"), (["saved", "microbatch"], "by fit", "undone")],
)
def test_under_a_hard_limit_the_fitted_step_lives_and_the_plain_one_dies(words: list[str], lives: str, dies: str, tmp_path: Path) -> None:
    """The limit is the budget, and beside it what a process only reserves: address space that is not in memory at the start."""
    run_limited(tmp_path / "plan.json", "planned", *words).check_returncode()
    fitted, plain = (run_limited(tmp_path / "plan.json", way, *words) for way in (lives, dies))
    assert fitted.stdout == "survived\n", fitted.stderr[-2000:]
    assert plain.returncode and "can't allocate memory" in plain.stderr
