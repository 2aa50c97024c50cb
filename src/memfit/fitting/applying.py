"""From a plan to a fitted step: its levers put on one after the other, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memfit.errors import MemfitError, PlanError
from memfit.levers import LEVERS, Lever, Undo
from memfit.levers.settings import damage_in
from memfit.records import EXACTNESS, Option, Plan, PlannedLever
from memfit.step import Step, device_of
from memfit.step.fingerprint import differences, fingerprint


def apply_plan(step: Step, plan: Plan, levers: Mapping[str, Lever] = LEVERS) -> Undo:
    """Change the step as the plan says; the answer changes it back. A step other than the planned one is refused, and a fitted one."""
    refuse_fitted(step)
    refuse_another_step(step, plan)
    refuse_damaged(plan)
    with Undo.or_nothing() as undo:
        undo.then(apply_levers(step, plan.levers, levers))
        undo.then(setattr, step.running, "levers_on", None)
        step.running.levers_on = [lever.name for lever in plan.levers]
    return undo


def refuse_fitted(step: Step) -> None:
    """Raise MemfitError where a plan is on already: compared with such a step, nothing would be proven of the plain one."""
    if step.running.levers_on is not None:
        levers = ", ".join(step.running.levers_on) or "with no technique"
        raise MemfitError(
            f"This step is fitted already ({levers}), so there is no plain step to plan for or to compare with: "
            "undo the first fit (fitted.undo()), then try again."
        )


def refuse_another_step(step: Step, plan: Plan) -> None:
    """Raise PlanError with every difference when the plan was made for another step, or for another device."""
    if plan.device not in ("", here := device_of(step)):
        raise PlanError(
            f"This plan was made for {plan.device}, and this step is on {here}, with other operators and other places for what is put "
            f"away. Build the step on {plan.device}, or plan again for {here}."
        )
    if found := differences(plan.step, fingerprint(step)):
        listed = "\n".join(f"  - {difference}" for difference in found)
        raise PlanError(f"This plan was made for another step:\n{listed}\nPlan again, for this step as it is now.")


def refuse_damaged(plan: Plan) -> None:
    """Raise PlanError when a row of the plan lacks what its lever works with: its file was edited, or cut short."""
    for lever in plan.levers:
        damage = damage_in(lever.name, lever.settings) if lever.exactness in EXACTNESS else f"its exactness is {lever.exactness!r}"
        if damage:
            raise PlanError(f"The plan's {lever.name} is damaged: {damage}. Plan again, and leave the file as memfit plan wrote it.")


def apply_levers(step: Step, rows: Iterable[PlannedLever], levers: Mapping[str, Lever] = LEVERS) -> Undo:
    """Put levers on in order; if one cannot act, those before it are taken off again."""
    with Undo.or_nothing() as undo:
        for lever in rows:
            undo.then(_known(lever.name, levers).apply(step, option_of(lever)))
    return undo


def _known(name: str, levers: Mapping[str, Lever]) -> Lever:
    if name not in levers:
        raise PlanError(f"The plan asks for a lever {name!r}, which this memfit does not have: upgrade memfit, or plan again.")
    return levers[name]


def option_of(lever: PlannedLever) -> Option:
    """The option that a row of a plan was made from."""
    return Option(lever.name, lever.option, lever.exactness, lever.settings, lever.why)
