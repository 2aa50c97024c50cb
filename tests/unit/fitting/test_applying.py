from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import MemfitError, PlanError
from memfit.fitting import applying
from memfit.fitting.applying import apply_plan
from memfit.levers import CannotApply, Undo
from memfit.records import Plan, PlannedLever
from memfit.step import Step
from memfit.step.running import Running
from small_levers import CHECKPOINT, NOTHING, SPLIT, SmallLever, plan_of
from small_steps import dense

LEVERS = {lever.name: lever for lever in (NOTHING, CHECKPOINT, SPLIT)}


def test_levers_are_put_on_in_order_and_taken_off() -> None:
    step = dense()
    undo = apply_plan(step, plan_of(step, NOTHING, CHECKPOINT, SPLIT), LEVERS)
    assert step.running.split is not None and len(step.running.around_loss) == 1
    assert "forward" in vars(step.models[""][0])
    undo()
    assert step.running == Running() and "forward" not in vars(step.models[""][0])


def test_a_lever_that_fails_takes_the_others_off_again() -> None:
    def refuse(step: Step, undo: Undo) -> None:
        raise CannotApply("not here")

    broken = SmallLever("broken", "bitwise", refuse)
    step = dense()
    with pytest.raises(CannotApply, match="not here"):
        apply_plan(step, plan_of(step, NOTHING, SPLIT, broken), LEVERS | {"broken": broken})
    assert step.running == Running()


def test_a_lever_gets_the_option_it_was_planned_with() -> None:
    seen = []

    class Asked(SmallLever):
        def apply(self, step, option):  # type: ignore[no-untyped-def]
            seen.append(option)
            return Undo()

    step = dense()
    lever = PlannedLever("asked", "2 of 4", "bitwise", 10, 0.5, {"size": 2}, "because")
    plan = replace(plan_of(step), levers=(lever,))
    apply_plan(step, plan, {"asked": Asked("asked", "bitwise", lambda step, undo: None)})()
    assert (seen[0].lever, seen[0].name, seen[0].exactness, seen[0].settings, seen[0].why) == (
        "asked", "2 of 4", "bitwise", {"size": 2}, "because"
    )  # fmt: skip


def test_another_step_is_refused_with_the_differences() -> None:
    step = dense()
    with pytest.raises(PlanError) as refused:
        apply_plan(replace(step, batch=torch.randn(4, 64)), plan_of(step, SPLIT), LEVERS)
    assert str(refused.value) == (
        "This plan was made for another step:\n"
        "  - batch: float32 [32, 64] when planned, float32 [4, 64] now\n"
        "Plan again, for this step as it is now."
    )
    assert step.running == Running()


def foreach_off(step: Step, undo: Undo) -> None:
    """As the optimizer lever: nothing of it is seen in how the step runs."""
    group = step.optimizers[0].param_groups[0]
    undo.then(group.__setitem__, "foreach", group["foreach"])
    group["foreach"] = False


@pytest.mark.parametrize("lever", [SPLIT, SmallLever("one by one", "bitwise", foreach_off)])
def test_a_fitted_step_is_not_planned_for_nor_proven_nor_fitted_again(lever: SmallLever) -> None:
    step, levers = dense(), {lever.name: lever}
    plan = plan_of(step, lever)
    undo = apply_plan(step, plan, levers)
    for again in (
        lambda: memfit.plan(step, "8GiB"),
        lambda: memfit.fit(step, "8GiB"),
        lambda: memfit.verify(step, plan, levers=levers),
        lambda: apply_plan(step, plan, levers),
    ):
        with pytest.raises(MemfitError, match=rf"This step is fitted already \({lever.name}\).*undo the first fit"):
            again()
    assert memfit.profile(step).peak_bytes > 0  # what the fitted step takes may be asked
    undo()
    assert step.running == Running() and memfit.verify(step, plan, levers=levers).equivalent


def test_what_undoes_takes_everything_off_before_ctrl_c_is_heard() -> None:
    taken_off: list[str] = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        taken_off.append("last")

    undo = Undo()
    undo.then(taken_off.append, "first")
    undo.then(interrupted)
    with pytest.raises(KeyboardInterrupt):
        undo()
    assert taken_off == ["last", "first"]


def test_a_plan_is_on_whole_or_not_at_all_when_ctrl_c_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    step, put_on = dense(), applying.apply_levers

    def interrupted(*args: Any) -> Undo:
        undo = put_on(*args)
        signal.raise_signal(signal.SIGINT)
        return undo

    monkeypatch.setattr(applying, "apply_levers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply_plan(step, plan_of(step, SPLIT), LEVERS)
    assert step.running == Running()


def test_an_empty_plan_is_a_plan_that_is_on() -> None:
    step = dense()
    undo = apply_plan(step, plan_of(step), LEVERS)
    with pytest.raises(MemfitError, match=r"This step is fitted already \(with no technique\).*undo the first fit"):
        apply_plan(step, plan_of(step, SPLIT), LEVERS)
    undo()
    other = apply_plan(step, plan_of(step, SPLIT), LEVERS)
    undo()
    with pytest.raises(MemfitError, match=r"fitted already \(split\)"):
        apply_plan(step, plan_of(step), LEVERS)
    other()
    assert step.running == Running()


def test_an_unknown_lever_is_refused() -> None:
    step = dense()
    with pytest.raises(PlanError, match="a lever 'split', which this memfit does not have: upgrade memfit, or plan again"):
        apply_plan(step, plan_of(step, SPLIT), {})


def test_a_plan_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = plan_of(dense(), NOTHING, SPLIT)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.to_dict()["schema"] == "memfit.plan/2"
