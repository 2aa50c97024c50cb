"""What a plan's file may hold for a lever: what it cannot work with is told before anything acts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.errors import PlanError
from memfit.fitting.applying import apply_plan, refuse_damaged
from memfit.levers import LEVERS
from memfit.levers.settings import damage_in
from memfit.records import PlannedLever
from memfit.step.running import Running
from small_levers import plan_of
from small_steps import dense

PARTS = {"size": 2, "batch": 4, "draws": {"": []}, "again": False}
DRAW = ["aten.bernoulli_.float", [4, 8], [], True]
ROW = {"module": None, "call": None, "ops": [["aten.relu.default", 0, "recompute"]]}
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("microbatch", PARTS | {"draws": {"": [DRAW, DRAW[:3]]}}),
    ("chunk", PARTS | {"draws": {"": [[DRAW], []]}}),
    ("attention", {"rows": 0, "modules": ["a"], "sdpa": []}),
    ("outer_product", {"where": "net.py:3"}),
    ("precision", {"dtype": "float16", "kept_in_float32": ["losses"]}),
    ("optimizer", {"how": "in backward", "excludes": ["microbatch"]}),
    ("loader", {"num_workers": 0, "cache": 0.5}),
    ("allocator", {"threshold": 2**20}),
    ("compile", {"modules": ["a"], "budget": 1.0, "split": PARTS, "measured_peak_bytes": 3, "measured_seconds": 0.1}),
    ("architecture", {"variant": "half"}),
    ("saved", {"": [ROW, {"module": "a.b", "call": 1, "ops": []}]}),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("microbatch", PARTS | {"size": True}, "'size' is True"),
    ("microbatch", PARTS | {"batch": 0}, "'batch' is 0"),
    ("microbatch", PARTS | {"draws": {"": [["aten.bernoulli_.float", "ab", []]]}}, "'draws' is"),
    ("microbatch", PARTS | {"draws": {"": [["aten.bernoulli_.float", [4, 8], [0, 0]]]}}, "'draws' is"),
    ("chunk", PARTS | {"draws": {"": [DRAW]}}, "'draws' is"),
    ("attention", {"rows": -1, "modules": ["a"], "sdpa": []}, "'rows' is -1"),
    ("attention", {"rows": 0, "modules": "abc", "sdpa": []}, "'modules' is 'abc'"),
    ("precision", {"dtype": "bfloat61"}, "'dtype' is 'bfloat61'"),
    ("optimizer", {"how": "foo"}, "'how' is 'foo'"),
    ("loader", {"num_worker": 1}, "'num_worker' is not known"),
    ("loader", {"num_workers": "2"}, "'num_workers' is '2'"),
    ("loader", {"cache": 2}, "'cache' is 2"),
    ("allocator", {}, "it needs one of holes, threshold, trim, cuda, mps, and has 0"),
    ("allocator", {"threshold": 2**40}, "'threshold' is 1099511627776"),
    ("allocator", {"cuda": "max_split_size:1"}, "'cuda' is 'max_split_size:1'"),
    ("compile", {"modules": ["a"]}, "'budget' is missing"),
    ("compile", {"modules": ["a"], "budget": 2.0}, "'budget' is 2.0"),
    ("compile", {"modules": ["a"], "budget": 1.0, "measured_seconds": "3"}, "'measured_seconds' is '3'"),
    ("saved", {"": [ROW | {"ops": [["aten.relu.default", 0, "recompute it"]]}]}, "'ops' is"),
    ("saved", {"": [ROW | {"ops": [["aten.relu.default", "first", "recompute"]]}]}, "'ops' is"),
    ("saved", {"": [{"module": None, "ops": []}]}, "'call' is missing"),
]


@pytest.mark.parametrize(("lever", "settings"), RIGHT)
def test_what_a_lever_works_with_is_read(lever: str, settings: dict[str, Any]) -> None:
    assert damage_in(lever, settings) == ""


def test_every_lever_reads_its_own() -> None:
    assert {lever for lever, _ in RIGHT} == LEVERS.keys()


@pytest.mark.parametrize(("lever", "settings", "words"), WRONG)
def test_what_a_lever_cannot_work_with_is_told(lever: str, settings: dict[str, Any], words: str) -> None:
    assert words in damage_in(lever, settings)
    step = dense()
    plan = replace(plan_of(step), levers=(PlannedLever(lever, "", "bitwise", settings=settings),))
    with pytest.raises(PlanError, match=rf"The plan's {lever} is damaged: .*Plan again") as no:
        apply_plan(step, plan)
    assert no.value.exit_code == 2 and step.running == Running()


def test_a_class_that_there_is_not_is_told() -> None:
    plan = replace(plan_of(dense()), levers=(PlannedLever("optimizer", "", "exact", settings={"how": "fused"}),))
    with pytest.raises(PlanError, match="The plan's optimizer is damaged: its exactness is 'exact'"):
        refuse_damaged(plan)
