"""Which combinations are looked at, and which are not worth their time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from memfit.levers import LEVERS
from memfit.levers.microbatch import MicroBatch
from memfit.planner.proposing import Proposer
from memfit.records import Ledger, Option, Speeds
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
