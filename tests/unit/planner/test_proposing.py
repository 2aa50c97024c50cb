"""Which combinations are looked at, and which are not worth their time."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from memfit import Step
from memfit.ledger import account
from memfit.levers import LEVERS
from memfit.levers.microbatch import MicroBatch
from memfit.planner.combining import Combination
from memfit.planner.comparing import Unchosen, compared
from memfit.planner.explaining import alternatives, explained_levers
from memfit.planner.proposing import Proposal, Proposals, Proposer, beside_the_peak
from memfit.planner.search import Table
from memfit.records import Ledger, Option, Process, Speeds
from quick_ledgers import seen
from small_steps import convolutional_3d, dense, transformer

SPEEDS = Speeds()
MIB = 2**20


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
        assert ours.at_least(place) <= ours._base(place) * (1 + 1e-9)


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
    levers = explained_levers(account(trace), found.combination.options, LEVERS, {})
    assert [(lever.saves_bytes, lever.saves_process_bytes) for lever in levers] == [(0, 2**28)]


def test_what_lost_says_what_it_takes_off_the_peak() -> None:
    ours, _ = proposer(convolutional_3d)
    plain = ours.combinations[0].whole
    lowest = ours.lowest("reordered", 1.0)
    assert lowest is not None
    untouched = Proposal(ours.combinations[0], Table({}, plain.peak_bytes, 0.0), 1.0, plain.process_high_bytes)
    (lost,) = alternatives(plain, untouched, Proposals(1.0, [untouched, lowest]), ())
    assert lost.saves_bytes == plain.peak_bytes - lowest.peak_bytes > 0


@pytest.mark.parametrize(
    ("seconds", "looked_at", "words"),
    [
        (1.12, False, "slower by 12 % or more, whichever results are kept"),
        (1.01, True, "no faster, whichever results are kept"),
        (inf, True, "does not fit, whichever results are kept: the peak stays 3.00 MiB too high, or more"),
        (0.9, True, "nothing that fits was found in the time; it could be faster by 10 % at most"),
        (0.9, False, "not looked at, the time was over; it could be faster by 10 % at most"),
    ],
)
def test_what_no_plan_was_found_for_says_why(seconds: float, looked_at: bool, words: str) -> None:
    ours, _ = proposer(convolutional_3d)
    whole, *_, parts = ours.combinations
    winner = Proposal(whole, Table({}, whole.whole.peak_bytes, 0.0), 1.0, whole.whole.process_high_bytes)
    (lost,) = alternatives(whole.whole, winner, Proposals(1.0, [winner]), [Unchosen(parts, seconds, 3 * MIB, looked_at)])
    assert (lost.name, lost.option) == ("microbatch", parts.options[0].name) and lost.rejected_because == words
    assert lost.saves_bytes is lost.costs_seconds is None  # nobody weighed it


def test_the_most_promising_of_what_was_skipped_come_first() -> None:
    """Under a limit that whole batches cannot keep, the winner divides the batch; the others say why they were left out."""
    levers = {word: LEVERS[word] for word in ("saved", "microbatch", "optimizer")}
    ours = Proposer(seen(convolutional_3d()), levers, "reordered", SPEEDS)
    limit = Proposer(seen(convolutional_3d()), levers, "reordered", SPEEDS)._search(0).floor - 1
    winner, *others = ours.propose(lambda combination: limit, 0.3).fitting
    assert "microbatch" in winner.combination.words
    found = compared(ours, winner, [winner, *others], lambda combination: limit, 1.0).unchosen
    first = {other.combination.words: other for other in found}
    assert first[frozenset()].seconds == inf and first[frozenset()].excess == 1
    assert len(first) == len(found)  # one of each set of levers
    assert winner.combination.options not in [other.combination.options for other in found]
    assert not any(o.combination.words > winner.combination.words and o.seconds >= winner.seconds for o in found)


def test_every_way_of_the_optimizer_is_weighed() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    ledger = seen(Step(net, lambda m, x: m(x).pow(2).mean(), optimizer, torch.ones(2, 64)))
    found = {o.name for c in Proposer(ledger, {"optimizer": LEVERS["optimizer"]}, "reordered", SPEEDS).combinations for o in c.options}
    assert found == {"parameter by parameter", "fused", "step inside backward"}


def with_loader(base: int = 1000 * MIB, **more: Any) -> Ledger:
    """A step whose eight workers hold 100 MiB each, and 4 batches of 10 MiB, half of them for later."""
    trace = seen(convolutional_3d()).trace
    assert trace is not None
    settings: dict[str, Any] = {"workers": 8, "workers_bytes": 8 * 140 * MIB, "waiting_bytes": 8 * 40 * MIB, "prefetch": 4}
    return account(replace(trace, process=Process(base, **settings, **more)), causes=False)


def loading(ledger: Ledger, less: int, allowed: str = "reordered") -> tuple[str, str]:
    """What of the loader is in the plan for a process that is so many MiB smaller, and what in the lowest of all."""
    ours = Proposer(ledger, {word: LEVERS[word] for word in ("loader", "saved")}, allowed, SPEEDS)
    lowest = ours.lowest(allowed, 0.1)
    assert lowest is not None

    def limit(combination: Combination) -> int:
        return ledger.process_high_bytes - less * MIB - beside_the_peak(combination.ledger)[0]

    fitting = ours.propose(limit, 0.5).fitting
    return ", ".join(o.name for o in fitting[0].combination.options) if fitting else "-", lowest.combination.options[0].name


@pytest.mark.parametrize(
    ("less", "option"),
    [
        (0, ""), (200, "1 batch fetched ahead"), (500, "4 workers"), (900, "1 worker"), (1000, "1 worker, 1 batch fetched ahead"),
        (1100, "no workers"), (1150, "no cache"), (2000, "no workers, no cache"), (2400, "-"),
    ],
)  # fmt: skip
def test_each_option_of_the_loader_is_taken_where_no_milder_one_is_enough(less: int, option: str) -> None:
    ledger = with_loader(2500 * MIB, cached_bytes=1200 * MIB) if less > 1100 else with_loader()
    strongest = "no workers, no cache" if less > 1100 else "no workers"
    assert loading(ledger, less) == (option, strongest)


def test_a_milder_option_of_the_loader_has_costs_too() -> None:
    ledger = with_loader()
    ours = Proposer(ledger, {word: LEVERS[word] for word in ("loader", "microbatch", "saved")}, "reordered", SPEEDS)
    most = ledger.process_high_bytes - 200 * MIB
    (found, *_) = ours.propose(lambda combination: most - beside_the_peak(combination.ledger)[0], 0.5).fitting
    assert found.combination.options[0].name == "1 batch fetched ahead"
    assert found.combination.options not in [combination.options for combination in ours.combinations]
    assert "loader" not in ours.costs_of(found)


def test_a_step_waits_for_its_samples_only_where_no_table_is_enough() -> None:
    ledger = with_loader()
    found = loading(ledger, 1012)  # 1 worker that fetches 1 batch ahead saves 1010
    assert found == ("1 worker, 1 batch fetched ahead", "no workers")


def test_other_random_numbers_are_weighed_apart() -> None:
    ledger = with_loader(workers_draw=True)
    assert loading(ledger, 200) == ("1 batch fetched ahead", "1 batch fetched ahead")
    ours = Proposer(ledger, {"loader": LEVERS["loader"]}, "redrawn", SPEEDS)
    stricter, lowest = ours.lowest("bitwise", 0.1), ours.lowest("redrawn", 0.1)
    assert stricter is not None and stricter.combination.options[0].name == "1 batch fetched ahead"
    assert lowest is not None and lowest.combination.options[0].name == "no workers"
