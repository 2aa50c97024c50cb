"""Which combinations are looked at, and which are not worth their time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from memfit.ledger import account
from memfit.levers import LEVERS
from memfit.levers.microbatch import MicroBatch
from memfit.planner.explaining import alternatives, planned_levers
from memfit.planner.proposing import Proposal, Proposals, Proposer
from memfit.planner.search import Table
from memfit.records import Ledger, Option, Process, Speeds
from quick_ledgers import seen
from small_steps import convolutional_3d, dense, transformer

SPEEDS = Speeds()


class Counted(MicroBatch):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        self.sizes.append(option.settings["size"])
        return super().rewrite(ledger, option)


def proposer(make: Any = dense) -> tuple[Proposer, Counted]:
    split = Counted()
    return Proposer(seen(make()), {"saved": LEVERS["saved"], "microbatch": split}, "reordered", SPEEDS), split


def test_micro_batches_are_not_worked_out_where_nothing_has_to_be_done() -> None:
    ours, split = proposer()
    found = ours.propose(lambda combination: 2**40, 1.0)
    assert len(ours.combinations) > 3 and split.sizes == [] and found.fitting[0].combination.options == ()


def test_the_lowest_is_looked_for_where_the_batch_is_divided_most() -> None:
    ours, split = proposer(convolutional_3d)
    found = ours.lowest("reordered", -1.0)
    assert split.sizes == [1] and found is not None and found.combination.repeats == ours.combinations[0].whole.batch_size
    assert (whole := ours.lowest("bitwise", -1.0)) is not None and whole.combination.options == ()
    assert found.process_high_bytes < whole.process_high_bytes


def test_what_no_table_can_bring_under_the_limit_takes_no_time() -> None:
    ours, _ = proposer(convolutional_3d)
    lowest = ours.lowest("reordered", 1.0)
    assert lowest is not None and not ours.propose(lambda combination: 0, 60.0).fitting
    started = time.thread_time()
    found = ours.propose(lambda combination: lowest.peak_bytes, 60.0).fitting
    assert found and found[0].peak_bytes <= lowest.peak_bytes and time.thread_time() - started < 20.0


def test_what_a_step_did_not_take_is_not_proposed_again() -> None:
    ours, _ = proposer(convolutional_3d)
    lowest = ours.lowest("reordered", 0.1)
    assert lowest is not None and lowest.combination.words == {"microbatch"}
    ours.refuse(lowest.combination)
    again = ours.lowest("reordered", 0.1)
    assert again is not None and again.combination.words == frozenset()
    ours.refuse(again.combination)
    assert ours.lowest("reordered", 0.1) is None and not ours.propose(lambda combination: 2**40, 1.0).fitting


@pytest.mark.parametrize("make", [dense, convolutional_3d, lambda: transformer(0.0)])
def test_what_is_said_without_the_line_is_never_more_than_with_it(make: Any) -> None:
    ours, _ = proposer(make)
    for place in range(len(ours.combinations)):
        assert ours._at_least(place) <= ours._base(place) * (1 + 1e-9)


def test_the_costs_of_levers_add_up_to_those_of_the_step() -> None:
    levers = {word: LEVERS[word] for word in ("saved", "microbatch", "optimizer")}
    ours = Proposer(seen(convolutional_3d()), levers, "reordered", SPEEDS)
    found = ours.lowest("reordered", 1.0)
    assert found is not None and "microbatch" in found.combination.words
    costs = ours.costs_of(found)
    plain = ours.propose(lambda combination: 2**40, 1.0).plain_seconds
    assert sum(costs.values()) == pytest.approx(found.seconds - plain) and costs["microbatch"] > 0
    assert costs.keys() <= {*found.combination.words, "saved"}


def test_what_changes_no_operator_has_no_cost_that_is_known() -> None:
    plain = seen(dense())
    assert plain.trace is not None
    trace = replace(plain.trace, process=Process(2**28, workers_bytes=2**28, workers=1))
    ours = Proposer(account(trace), {"loader": LEVERS["loader"]}, "reordered", SPEEDS)
    found = ours.lowest("reordered", 1.0)
    assert found is not None and found.combination.words == {"loader"} and ours.costs_of(found) == {}
    levers = planned_levers(account(trace), found.combination.options, LEVERS, {})
    assert [(lever.saves_bytes, lever.saves_process_bytes) for lever in levers] == [(0, 2**28)]


def test_what_lost_says_what_it_takes_off_the_peak() -> None:
    ours, _ = proposer(convolutional_3d)
    plain = ours.combinations[0].whole
    lowest = ours.lowest("reordered", 1.0)
    assert lowest is not None
    untouched = Proposal(ours.combinations[0], Table({}, plain.peak_bytes, 0.0), 1.0, plain.process_high_bytes)
    (lost,) = alternatives(plain, untouched, Proposals(1.0, [untouched, lowest]))
    assert lost.saves_bytes == plain.peak_bytes - lowest.peak_bytes > 0
