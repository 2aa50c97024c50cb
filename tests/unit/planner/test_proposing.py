"""Which combinations are looked at, and which are not worth their time."""

from __future__ import annotations

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
    found = ours.propose(lambda ledger: 2**40, 1.0)
    assert len(ours.combinations) > 3 and split.sizes == [] and found.fitting[0].combination.options == ()


def test_without_time_and_without_luck_only_the_smallest_parts_are_tried() -> None:
    ours, split = proposer()
    found = ours.propose(lambda ledger: 0, -1.0)
    assert split.sizes == [1] and not found.fitting and found.lowest is not None
    ours.propose(lambda ledger: 0, 60.0)
    assert len(split.sizes) == len(ours.combinations) - 1  # with time, all of them


@pytest.mark.parametrize("make", [dense, convolutional_3d, lambda: transformer(0.0)])
def test_what_is_said_without_the_line_is_never_more_than_with_it(make: Any) -> None:
    ours, _ = proposer(make)
    for place in range(len(ours.combinations)):
        assert ours._at_least(place) <= ours._base(place) * (1 + 1e-9)
