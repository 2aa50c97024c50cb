"""Sums that add up to the byte, on a trace that can be counted by hand and on real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import memfit
from memfit import Step
from memfit.errors import MemfitError
from memfit.ledger import account
from memfit.ledger.timeline import live_bytes
from memfit.levers.rewriting import rewritten
from memfit.records import Op, Process, Saved, Storage, Trace
from small_steps import SMALL_STEPS


def op(name: str, phase: str, **options: object) -> Op:
    return Op(name, phase, "", f"module.{name}", f"train.py:{len(name)}", (), (), **options)  # type: ignore[arg-type]


BY_HAND = Trace(
    ops=(op("conv", "forward"), op("relu", "forward"), op("grad", "backward", workspace=40, workspace_error=4), op("update", "optimizer")),
    storages=(
        Storage(1000, -1, None, "parameters", name="weight"),
        Storage(100, -1, None, "batch", name="batch"),
        Storage(500, 0, 2),  # kept for backward
        Storage(300, 1, 1),  # only passing
        Storage(200, 2, None, "gradients"),
        Storage(7, -1, None),
    ),
    saved=(Saved(2, 0, 2),),
    calls=(),
    models=(),
    process=Process(10_000, -5, 50, 90, 3, 1),
    predicted=True,
    device="cpu",
    batch_size=1,
)


def test_a_trace_counted_by_hand() -> None:
    ledger = account(BY_HAND)
    assert ledger.timeline == (1607, 1907, 1847, 1307)
    assert (ledger.peak_bytes, ledger.peak_op) == (1907, 1)
    assert ledger.by_category == {
        "parameters": 1000,
        "gradients": 0,
        "optimizer": 0,
        "activations": 500,
        "temporaries": 300,
        "batch": 100,
        "other": 7,
    }
    assert [(o.bytes, o.category, o.op, o.module) for o in ledger.at_peak[:3]] == [
        (1000, "parameters", "", "weight"),
        (500, "activations", "conv", "module.conv"),
        (300, "temporaries", "relu", "module.relu"),
    ]
    assert ledger.process_bytes == 10_000 + 1907 + 3 + 50
    assert [(s.phase, s.first, s.last) for s in ledger.stretches] == [("forward", 0, 1), ("backward", 2, 2), ("optimizer", 3, 3)]


def test_each_module_has_its_own_highest_moment_whenever_the_peak_is() -> None:
    """module.grad is highest after the peak, with what it makes and what it takes inside."""
    again = replace(BY_HAND, storages=(*BY_HAND.storages, Storage(60, 0, 0), Storage(30, 2, 2)))
    assert account(again).most_by_module == {
        "weight": 1000, "module.conv": 560, "module.relu": 300, "module.grad": 270, "batch": 100, "": 7
    }  # fmt: skip
    assert account(again).by_module.get("module.grad") is None and account(again, causes=False).most_by_module == {}


def test_a_workspace_counts_while_its_op_runs_and_widens_the_interval() -> None:
    storages = tuple(replace(s, bytes=0) if s.bytes == 300 else s for s in BY_HAND.storages)
    ledger = account(replace(BY_HAND, storages=storages))
    assert (ledger.peak_bytes, ledger.peak_op) == (1847, 2)
    assert (40, "temporaries", "grad (workspace)") in [(o.bytes, o.category, o.op) for o in ledger.at_peak]
    assert ledger.high_bytes - ledger.peak_bytes == 4 + int(0.005 * 1847) == ledger.peak_bytes - ledger.low_bytes


def test_an_op_of_which_little_is_known_widens_the_interval_wherever_it_runs() -> None:
    ops = tuple(replace(o, workspace_error=900) if o.name == "conv" else o for o in BY_HAND.ops)
    ledger = account(replace(BY_HAND, ops=ops))
    assert ledger.peak_bytes == 1907 and ledger.high_bytes == 1607 + 900 + int(0.005 * 1907)
    assert ledger.low_bytes == 1907 - int(0.005 * 1907)


def test_a_measured_trace_has_no_interval_and_the_measured_process() -> None:
    ledger = account(replace(BY_HAND, predicted=False, process=replace(BY_HAND.process, measured_bytes=12_345)))
    assert ledger.low_bytes == ledger.peak_bytes == ledger.high_bytes
    assert ledger.process_low_bytes == ledger.process_bytes == ledger.process_high_bytes == 12_345


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(MemfitError, match="ran no operator at all"):
        account(replace(BY_HAND, ops=(), storages=()))


@pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])
@pytest.mark.parametrize("make", SMALL_STEPS.values(), ids=SMALL_STEPS)
def test_every_attribution_sums_to_the_peak(make: Callable[[], Step], simulate: bool) -> None:
    ledger = memfit.profile(make(), simulate=simulate)
    for sums in (ledger.by_category, ledger.by_module, ledger.by_op, ledger.by_source):
        assert sum(sums.values()) == ledger.peak_bytes
    assert sum(owner.bytes for owner in ledger.at_peak) == ledger.peak_bytes == max(ledger.timeline)
    assert all(0 < size <= ledger.most_by_module[module] <= ledger.peak_bytes for module, size in ledger.by_module.items())
    assert ledger.timeline[ledger.peak_op] == ledger.peak_bytes
    assert ledger.trace is not None and tuple(live_bytes(ledger.trace)) == ledger.timeline
    assert ledger.by_category["parameters"] == sum(s.bytes for s in ledger.trace.storages if s.kind == "parameters")
    covered = [n for s in ledger.stretches for n in range(s.first, s.last + 1)]
    assert covered == list(range(len(ledger.timeline)))


def test_a_peak_that_the_devices_allocator_counted_is_the_ledgers() -> None:
    process = replace(BY_HAND.process, measured_bytes=90_000, measured_peak_bytes=2000)
    ledger = account(replace(BY_HAND, process=process, predicted=False, device="cuda"))
    assert ledger.peak_bytes == ledger.low_bytes == ledger.high_bytes == sum(ledger.by_category.values()) == 2000
    assert ledger.process_bytes == 90_000 and ledger.timeline == (1607, 2000, 1847, 1307)
    assert next(owner.bytes for owner in ledger.at_peak if owner.op.endswith("(workspace)")) == 93
    assert ledger.trace is not None and rewritten(ledger, ledger.trace).process.measured_peak_bytes is None
    seen_more = replace(process, measured_peak_bytes=7)  # what a step holds on the host is not the device's
    assert account(replace(BY_HAND, process=seen_more, predicted=False)).peak_bytes == 1907
