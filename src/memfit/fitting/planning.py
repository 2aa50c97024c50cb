"""`memfit.plan`: the fastest set of techniques that makes a step fit a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from memfit.capture import capture
from memfit.capture.op_times import OpCalls
from memfit.capture.process import warmed_up_once
from memfit.capture.speeds import times_slower_in_half
from memfit.errors import Infeasible, MemfitError
from memfit.fitting.applying import refuse_fitted
from memfit.fitting.captured_lever import with_captured
from memfit.fitting.host_memory import host_room_of
from memfit.fitting.plan_search import FoundPlan, PlanSearch, Request
from memfit.fitting.timed_ledgers import seen_with_times, variants_of, with_times
from memfit.growth import growth_facts
from memfit.ledger import account
from memfit.levers import LEVERS, Lever
from memfit.levers.architecture import ArchitectureLever
from memfit.planner.explaining import without_half
from memfit.records import EXACTNESS, Ledger, Plan
from memfit.step import Step, device_of
from memfit.step.fingerprint import fingerprint
from memfit.units import parse_bytes

_EMULATED, _CHEAP = 3.0, 1.5  # times slower than float32, beyond which half precision is not weighed where something so cheap does it


def plan(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> Plan:
    """The fastest plan whose process stays inside the budget, captured once more before it is shown; Infeasible where there is none.

    `host_budget` limits what the process and its workers take of the host's memory, where the device has memory of its own.

    >>> import torch
    >>> net = torch.nn.Linear(8, 8)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))
    >>> plan(step, "8GiB").levers  # a budget above the need changes nothing
    ()
    """
    return find_plan(step, budget, allow=allow, device=device, host_budget=host_budget, levers=levers, progress=progress).plan


def find_plan(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
    quick: bool = False,
    first: Ledger | None = None,
) -> FoundPlan:
    """What `plan` finds, with the ledgers. `quick`: only whether there is a plan counts, so nothing is timed, and nothing explained.

    `first` is the plain step as this process predicted it before: the step has been run since.
    """
    refuse_fitted(step)
    request = Request(parse_bytes(budget), allow, device, host_budget, levers, quick, first)
    refuse_unknown_exactness(allow)
    return _found(step, request, progress)


def _found(step: Step, request: Request, progress: Callable[[str], None]) -> FoundPlan:
    """Without half precision where that is dear here and something cheap does it; as it was asked for otherwise."""
    if request.half and _is_emulated(step, request.device):
        fewer = {name: lever for name, lever in request.levers.items() if name != "precision"}
        with suppress(Infeasible):
            found = _found(step, replace(request, levers=fewer), progress)
            if (found.plan.predicted_slowdown or 1.0) < _CHEAP:
                return replace(found, plan=without_half(found.plan, times_slower_in_half()))
    return _found_with_all(step, request, progress)


def _found_with_all(step: Step, request: Request, progress: Callable[[str], None]) -> FoundPlan:
    calls, device, half = OpCalls(), request.device, request.half
    plain = account(capture(step, True, device, progress, calls, half))
    plain = plain if request.first is None else warmed_up_once(plain, request.first)
    host_room = host_room_of(plain, request.host_budget)
    if plain.process_high_bytes <= request.budget:
        return FoundPlan(_empty(step, request, plain), plain, plain)
    costed = plain if request.quick else with_times(plain, calls, progress)

    def seen(changed: Step) -> Ledger:
        if request.quick:
            return account(capture(changed, True, device, progress, half=half))
        return seen_with_times(changed, device, half, progress)

    levers = with_captured(request.levers, step, costed, seen, request.allow, progress)
    if request.allow == "altered" and "architecture" in levers:
        levers = {**levers, "architecture": ArchitectureLever(variants_of(step, seen, progress))}
    progress("weighing techniques")
    return PlanSearch(step, replace(request, levers=levers), plain, costed, host_room, progress).search()


def refuse_unknown_exactness(allow: str) -> None:
    """Raise where `allow` is no class."""
    if allow not in EXACTNESS:
        raise MemfitError(f"There is no exactness {allow!r}: allow one of {', '.join(EXACTNESS)}.")


def _is_emulated(step: Step, device: str | None) -> bool:
    """Whether half precision runs without instructions for it: then what its operators take inside is minutes to measure, for nothing."""
    return (device or device_of(step)) == "cpu" and times_slower_in_half() > _EMULATED


def _empty(step: Step, request: Request, plain: Ledger) -> Plan:
    seconds = time.monotonic() - request.started
    return Plan(
        True,
        request.budget,
        plain.peak_bytes,
        plain.process_bytes,
        1.0,
        "bitwise",
        (),
        planning_seconds=seconds,
        step=fingerprint(step),
        device=plain.device,
        predicted_host_bytes=plain.process.host_bytes,
        not_weighed=dict.fromkeys(EXACTNESS, "the step fits as it is"),
        **growth_facts(plain, request.budget),
    )
