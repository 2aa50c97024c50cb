"""A device with memory of its own: results wait in the host's, as much of it as may be used, and never in a place that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import Infeasible, Ledger, MemfitError, Plan, Step
from memfit.capture import speeds
from memfit.fitting import applying, given_plan, plan_rows
from memfit.levers import LEVERS
from memfit.levers.saved import table_option
from memfit.levers.saved.line import line_of
from memfit.levers.saved.table import DISK, HOST
from memfit.planner.away import away_from
from memfit.planner.costs import seconds_of
from memfit.planner.search import Search
from memfit.records import Speeds
from quick_ledgers import seen

SAVED = {"saved": LEVERS["saved"]}
_MIB = 2**20


def deep(layers: int = 24) -> Step:
    """Matrix products all the way: dear to make again, so that a tight budget puts some of them away."""
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4096, 512))


@pytest.fixture
def fast_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that multiplies slowly and has a fast way to its host, so that plans put results there."""
    monkeypatch.setitem(speeds._TYPICAL, "cuda", Speeds(flops=1e9, host=1e14))


def planned(step: Step, device: str, host_budget: str | int | None = None) -> Plan:
    plain = memfit.profile(step, simulate=True, device=device)
    budget = plain.process_high_bytes - int(0.55 * (plain.peak_bytes - plain.by_category["parameters"]))
    return memfit.plan(step, budget, device=device, host_budget=host_budget, levers=SAVED)


def words(plan: Plan) -> set[str]:
    rows: list[Any] = [row for lever in plan.levers for phase in lever.settings.values() for row in phase]
    return {word for row in rows for _, _, word in row["ops"]}


@pytest.mark.parametrize(("device", "absent"), [("cuda", DISK), ("mps", DISK), ("mps", HOST), ("cpu", HOST)])
def test_results_wait_only_where_the_device_has_another_place(device: str, absent: str) -> None:
    plan = planned(deep(), device)
    assert plan.feasible and plan.levers and absent not in words(plan)


@pytest.mark.usefixtures("fast_host")
def test_what_is_put_on_the_host_is_counted() -> None:
    step = deep()
    ledger = memfit.profile(step, simulate=True, device="cuda")
    base = ledger.process.host_bytes
    assert base > 100 * _MIB and ledger.process.workers_bytes == 0
    plan = planned(step, "cuda")
    assert words(plan) == {HOST} and plan.predicted_host_bytes > base + 32 * _MIB
    assert planned(step, "cpu").predicted_host_bytes == 0


@pytest.mark.usefixtures("fast_host")
def test_the_host_budget_holds() -> None:
    step = deep()
    much = planned(step, "cuda").predicted_host_bytes
    limit = much - 24 * _MIB
    plan = planned(step, "cuda", limit)
    assert HOST in words(plan) and words(plan) != {HOST} and plan.predicted_host_bytes <= limit < much


@pytest.mark.usefixtures("fast_host")
@pytest.mark.parametrize("grown", [0, 64 * _MIB])
def test_the_host_budget_holds_for_a_plan_that_was_made_before_the_process_grew(grown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = deep()
    plan, real = planned(step, "cuda"), given_plan.profile

    def on_card(step: Step, **asked: Any) -> Ledger:
        ledger = real(step, **asked | {"device": "cuda"})
        return replace(ledger, process=replace(ledger.process, host_bytes=ledger.process.host_bytes + grown))

    monkeypatch.setattr(given_plan, "profile", on_card)
    monkeypatch.setattr(given_plan, "captured", lambda *asked: plan_rows.captured(*asked, device="cuda"))
    monkeypatch.setattr(applying, "device_of", lambda step: "cuda")
    now = plan.predicted_host_bytes + grown
    found = given_plan.given(plan, step, "64GiB", levers=SAVED, host_budget=now + 16 * _MIB)  # libraries settle while a process runs
    assert abs(found.plan.predicted_host_bytes - now) < 16 * _MIB
    with pytest.raises(Infeasible, match=r"would take up to .* of the host's memory, and the budget is"):
        given_plan.given(plan, step, "64GiB", levers=SAVED, host_budget=now - 16 * _MIB)


def test_a_host_budget_below_what_the_process_takes_anyway_is_an_honest_no() -> None:
    with pytest.raises(Infeasible, match=r"host budget of 1\.00 MiB: interpreter, libraries and loader workers take"):
        planned(deep(2), "cuda", "1MiB")


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_host_budget_where_there_is_no_other_memory_is_a_mistake(device: str) -> None:
    with pytest.raises(MemfitError, match="leave the host budget out") as told:
        planned(deep(2), device, "8GiB")
    assert told.value.exit_code == 2


def test_a_search_keeps_to_the_room_there_is() -> None:
    ledger = seen(deep())
    assert ledger.trace is not None
    line, fast = line_of(ledger.trace), Speeds(host=1e14)  # so fast that everything would be put there
    seconds = seconds_of(ledger.trace, fast)
    limit = int(0.5 * ledger.peak_bytes)

    def put_there(room: float) -> int:
        found = Search(line, seconds, fast, away_from("cuda", room)).fastest(limit)
        assert found is not None and found.peak <= limit
        return sum(ledger.trace.storages[s].bytes for op, do in found.ops.items() if do == HOST for s in line.made[op])  # type: ignore[union-attr]

    assert put_there(float("inf")) > 32 * _MIB
    assert put_there(32 * _MIB) <= 32 * _MIB
    assert put_there(0) == 0


def test_a_simulated_device_gives_up_what_waits_on_its_host() -> None:
    step = deep(12)
    plain = memfit.profile(step, simulate=True, device="cuda")
    assert plain.trace is not None
    line = line_of(plain.trace)
    option = table_option(plain.trace, dict.fromkeys(line.made, HOST), "everything on the host")
    with LEVERS["saved"].apply(step, option):
        fitted = memfit.profile(step, simulate=True, device="cuda")
    told = LEVERS["saved"].rewrite(plain, option)
    assert fitted.peak_bytes < 0.7 * plain.peak_bytes and abs(told.peak_bytes - fitted.peak_bytes) <= 0.02 * fitted.peak_bytes


@pytest.mark.parametrize(("device", "word"), [("cpu", HOST), ("mps", HOST), ("mps", DISK)])
def test_where_there_is_no_such_place_a_simulated_step_keeps_it_and_so_does_the_ledger(device: str, word: str) -> None:
    step = deep(4)
    plain = memfit.profile(step, simulate=True, device=device)
    assert plain.trace is not None
    option = table_option(plain.trace, dict.fromkeys(line_of(plain.trace).made, word), "everything put away")
    with LEVERS["saved"].apply(step, option):
        assert memfit.profile(step, simulate=True, device=device).peak_bytes == plain.peak_bytes
    assert LEVERS["saved"].rewrite(plain, option).peak_bytes == plain.peak_bytes


def test_on_a_cpu_what_is_meant_for_the_host_is_where_it_is() -> None:
    step = deep(4)
    ledger = seen(step)
    assert ledger.trace is not None
    option = table_option(ledger.trace, dict.fromkeys(line_of(ledger.trace).made, HOST), "everything on the host")
    before = memfit.profile(step).peak_bytes
    with LEVERS["saved"].apply(step, option):
        assert memfit.profile(step).peak_bytes == before
