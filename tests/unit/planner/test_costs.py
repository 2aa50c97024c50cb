"""What an op is believed to take: timed, or estimated in the measure of its kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memfit.levers import LEVERS
from memfit.planner.combining import combinations
from memfit.planner.costs import seconds_of, timed_share
from memfit.planner.proposing import Proposer
from memfit.records import Ledger, Speeds
from quick_ledgers import seen
from small_steps import dense

SPEEDS = Speeds()


def with_seconds(seconds: float | None) -> Ledger:
    ledger = seen(dense())
    assert ledger.trace is not None
    ops = tuple(replace(op, seconds=seconds) for op in ledger.trace.ops)
    return replace(ledger, trace=replace(ledger.trace, ops=ops))


def test_timed_seconds_come_before_estimates() -> None:
    trace = with_seconds(0.25).trace
    assert trace is not None and timed_share(trace, SPEEDS) == 1.0
    assert set(seconds_of(trace, SPEEDS)) == {0.25}


def test_an_op_that_was_not_timed_is_estimated_in_the_measure_of_its_kind() -> None:
    trace = with_seconds(None).trace
    assert trace is not None and timed_share(trace, SPEEDS) == 0.0
    before = seconds_of(trace, SPEEDS)
    first, second = (n for n, op in enumerate(trace.ops) if op.name == "aten.addmm.default")
    ops = tuple(replace(op, seconds=3 * before[n]) if n == first else op for n, op in enumerate(trace.ops))
    after = seconds_of(replace(trace, ops=ops), SPEEDS)
    assert after[second] == pytest.approx(3 * before[second]) and after[first] == 3 * before[first]
    others = [n for n, op in enumerate(trace.ops) if op.name != "aten.addmm.default"]
    assert np.array_equal(after[others], before[others])


def test_looking_at_what_is_there_costs_next_to_nothing() -> None:
    trace = with_seconds(None).trace
    assert trace is not None
    seconds = seconds_of(trace, SPEEDS)
    looks = [s for s, op in zip(seconds, trace.ops, strict=True) if op.name.startswith(("aten.t.", "aten.detach."))]
    assert looks and max(looks) == min(seconds)


def test_a_micro_batch_takes_its_share_and_the_optimizer_steps_once() -> None:
    ledger = with_seconds(1.0)
    levers = {"microbatch": LEVERS["microbatch"]}
    proposer = Proposer(ledger, levers, "reordered", SPEEDS)
    assert ledger.trace is not None
    stepping = sum(op.phase == "optimizer" for op in ledger.trace.ops)
    halves = next(place for place, c in enumerate(proposer.combinations) if c.repeats == 2)
    line = proposer.combinations[halves].ledger.trace
    assert line is not None and {op.seconds for op in line.ops if op.phase == "optimizer"} == {1.0}
    assert {op.seconds for op in line.ops if op.phase != "optimizer"} == {0.5, 1.0}  # what does not grow with the batch stays
    whole = len(ledger.trace.ops)
    assert whole < proposer._base(halves) < 2 * whole - stepping


def test_memory_given_back_at_once_has_its_price() -> None:
    ledger = with_seconds(1.0)
    assert ledger.trace is not None
    large = tuple(replace(s, bytes=s.bytes << 12) for s in ledger.trace.storages)
    process = replace(ledger.process, slack_high_bytes=1 << 40)
    ledger = replace(ledger, step_seconds=9.0, process_high_bytes=1 << 41, process=process,
                     trace=replace(ledger.trace, step_seconds=9.0, storages=large, process=process))  # fmt: skip
    found = list(combinations(ledger, {"allocator": LEVERS["allocator"]}, "bitwise"))
    assert [c.beside > 0 for c in found] == [False, True, True]  # as it is, holes given back, thresholds pinned
