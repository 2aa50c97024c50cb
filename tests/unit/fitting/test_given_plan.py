"""A plan made before, given to `memfit.fit`: applied as it is where it fits this step and this budget, else refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from memfit.errors import Infeasible, PlanError
from memfit.records import Plan, PlannedLever
from memfit.step.fingerprint import fingerprint
from small_levers import CHECKPOINT, SPLIT, WRONG, plan_of
from small_steps import dense, transformer

ENOUGH = "16GiB"


def pinned(step: memfit.Step) -> Plan:
    lever = PlannedLever("allocator", "1 MiB and more given back at once", "bitwise", settings={"threshold": 2**20})
    return Plan(True, 2**40, 1, 1, 1.1, "bitwise", (lever,), step=fingerprint(step))


def test_a_plan_from_a_file_is_proven_and_applied(tmp_path: Path) -> None:
    step = dense()
    pinned(step).save(tmp_path / "plan.json")
    fitted = memfit.fit(step, ENOUGH, plan=Plan.load(tmp_path / "plan.json"))
    assert [lever.name for lever in fitted.plan.levers] == ["allocator"] == list(fitted.verdict.levers)
    assert fitted.verdict.equivalent and fitted.plan.predicted_slowdown == 1.1
    assert fitted.plan.budget_bytes == 16 * 2**30 and fitted.plan.predicted_peak_bytes == fitted.ledger.peak_bytes > 1
    assert isinstance(fitted(step.batch), float)
    fitted.undo()


def test_levers_act_only_while_they_are_looked_at() -> None:
    from memfit.fitting.given_plan import given

    step = dense()
    found = given(plan_of(step, SPLIT), step, ENOUGH, levers={SPLIT.name: SPLIT})
    assert step.running.split is None and len(found.fitted.timeline) > len(found.plain.timeline)


def test_a_plan_for_another_step_is_refused_with_the_differences() -> None:
    with pytest.raises(PlanError, match="This plan was made for another step:\n  - "):
        memfit.fit(transformer(), ENOUGH, plan=pinned(dense()))


def test_a_plan_for_another_device_is_refused_with_the_way_out() -> None:
    step = dense()
    plan = memfit.plan(step, ENOUGH, device="cuda:0")
    assert plan.device == "cuda" and memfit.plan(step, ENOUGH).device == "cpu"
    for use in (lambda: memfit.fit(step, ENOUGH, plan=plan), lambda: memfit.verify(step, plan)):
        with pytest.raises(
            PlanError, match=r"^This plan was made for cuda, and this step is on cpu.*\. Build the step on cuda, or plan"
        ) as no:
            use()
        assert no.value.exit_code == 2


def test_a_plan_that_knows_no_device_is_one_for_where_the_step_is() -> None:
    step = dense()
    told = {k: v for k, v in memfit.plan(step, ENOUGH).to_dict().items() if k != "device"}
    assert Plan.from_dict(told).device == "" and memfit.fit(step, ENOUGH, plan=Plan.from_dict(told)).verdict.equivalent


def test_a_plan_that_does_not_fit_is_a_no_that_names_it() -> None:
    step = dense()
    with pytest.raises(Infeasible, match=r"With this plan the step would take up to .* and the budget is 8\.00 MiB\. Plan again") as no:
        memfit.fit(step, "8MiB", plan=pinned(step))
    assert no.value.lowest_bytes > 2**23 and not no.value.plan.feasible and no.value.plan.budget_bytes == 2**23
    assert step.running.beside is None


def test_a_plan_is_no_permission_for_a_looser_class() -> None:
    step = dense()
    rounded = replace(
        pinned(step), exactness="rounded", levers=(PlannedLever("precision", "bfloat16", "rounded", settings={"dtype": "bfloat16"}),)
    )
    with pytest.raises(PlanError, match=r"uses precision \(rounded\), and no more than reordered is allowed: allow rounded"):
        memfit.fit(step, ENOUGH, plan=rounded)
    with pytest.raises(memfit.MemfitError, match="There is no exactness 'sloppy'"):
        memfit.fit(step, ENOUGH, plan=rounded, allow="sloppy")


def test_a_plan_is_proven_wherever_it_comes_from() -> None:
    step, wrong = dense(), WRONG["lost part"]
    with pytest.raises(memfit.NotEquivalent) as no:
        memfit.fit(step, ENOUGH, plan=plan_of(step, wrong), levers={wrong.name: wrong})
    assert [lever.name for lever in no.value.plan.levers] == ["lost part"] and not no.value.verdict.equivalent


def test_a_host_budget_counts_for_a_given_plan() -> None:
    step = dense()
    with pytest.raises(memfit.MemfitError, match="A host budget is for devices with memory of their own"):
        memfit.fit(step, ENOUGH, plan=plan_of(step, CHECKPOINT), levers={CHECKPOINT.name: CHECKPOINT}, host_budget="8GiB")
