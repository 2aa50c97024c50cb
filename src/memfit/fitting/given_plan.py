"""A plan that was made before, as one from a committed file: whether it is for this step, is allowed, and stays inside the budget today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from memfit.capture.process import warmed_up_once
from memfit.errors import Infeasible, PlanError
from memfit.fitting.applying import option_of, refuse_another_step, refuse_damaged
from memfit.fitting.host_memory import host_room_of, put_on_host_by
from memfit.fitting.plan_rows import captured
from memfit.fitting.plan_search import FoundPlan
from memfit.fitting.planning import refuse_unknown_exactness
from memfit.growth import growth_facts
from memfit.levers import LEVERS, Lever
from memfit.planner.combining import is_allowed
from memfit.profiling import profile
from memfit.records import Ledger, Plan
from memfit.step import Step
from memfit.units import format_bytes, parse_bytes


def given(
    plan: Plan,
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
    first: Ledger | None = None,
) -> FoundPlan:
    """The plan with what it takes of this budget here and now; nothing else is looked for. `first` as for `find_plan`."""
    budget_bytes = parse_bytes(budget)
    refuse_another_step(step, plan)
    refuse_damaged(plan)
    _refuse_looser(plan, allow)
    plain = profile(step, simulate=True, progress=progress)
    plain = plain if first is None else warmed_up_once(plain, first)
    progress("capturing the plan with simulated tensors")
    fitted = captured(step, plan.levers, levers, plain)
    on_host = put_on_host_by(plan.levers, fitted)
    plan = replace(
        plan,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=fitted.peak_bytes,
        predicted_process_bytes=fitted.process_bytes,
        predicted_host_bytes=plain.process.host_bytes + on_host,
        **growth_facts(fitted, budget_bytes),
    )
    if fitted.process_high_bytes > budget_bytes:
        raise _too_much(plan, "", fitted.process_high_bytes, budget_bytes)
    if on_host > host_room_of(plain, host_budget):
        raise _too_much(plan, " of the host's memory", plan.predicted_host_bytes, parse_bytes(host_budget or 0))
    return FoundPlan(plan, plain, fitted)


def _refuse_looser(plan: Plan, allow: str) -> None:
    refuse_unknown_exactness(allow)
    if looser := [lever for lever in plan.levers if not is_allowed(option_of(lever), allow)]:
        words = ", ".join(f"{lever.name} ({lever.exactness})" for lever in looser)
        raise PlanError(
            f"This plan uses {words}, and no more than {allow} is allowed: allow {plan.exactness} with --allow (in Python allow=), or plan "
            "again."
        )


def _too_much(plan: Plan, of_what: str, taken: int, budget: int) -> Infeasible:
    no = Infeasible(
        f"With this plan the step would take up to {format_bytes(taken)}{of_what}, and the budget is {format_bytes(budget)}. Plan again "
        "for this budget, or give a larger one.",
        taken,
        {},
    )
    no.plan = replace(plan, feasible=False)
    return no
