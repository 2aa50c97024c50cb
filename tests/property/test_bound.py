"""What is said to be out of reach is: no table that fits is faster than the bound, whatever it decides."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_planner import NETWORKS, SHARES, SPEEDS, limits, network, quickly, search_of
from torch import nn

from memfit import Step
from memfit.levers import LEVERS
from memfit.levers.saved.table import BITS, CACHE, DISK, RECOMPUTE
from memfit.planner.away import Away
from memfit.planner.bound import least_seconds
from memfit.planner.comparing import compared
from memfit.planner.costs import seconds_of
from memfit.planner.proposing import Proposal, Proposer
from memfit.planner.search import Search
from memfit.records import Speeds
from quick_ledgers import seen
from small_steps import SMALL_STEPS

MOST = 4  # results decided about: beyond, trying everything takes too long


def everything(search: Search) -> list[tuple[int, float]]:
    """Peak and seconds of every table."""
    ways = (None, RECOMPUTE, CACHE, *([DISK] if search.away.word else []))
    tables = product(ways, repeat=len(search.candidates))
    chosen = [{op: way for op, way in zip(search.candidates, table, strict=True) if way} for table in tables]
    packings = ({}, dict.fromkeys(search.masks, BITS)) if search.masks else ({},)
    outcomes = [search.evaluation.of({**search.always, **packing, **ops}) for ops in chosen for packing in packings]
    return [(outcome.peak, outcome.seconds) for outcome in outcomes]


def refuted(search: Search, limit: int, every: list[tuple[int, float]]) -> bool:
    bound = least_seconds(search, limit, 1.0)
    return any(seconds < bound for peak, seconds in every if peak <= limit)


@quickly
@given(NETWORKS, SHARES, st.booleans())
def test_no_table_is_faster_than_the_bound(kinds: list[str], shares: list[float], disk: bool) -> None:
    search = search_of(network(kinds), disk)
    assume(1 <= len(search.candidates) <= MOST)
    every = everything(search)
    for limit in limits(min(peak for peak, _ in every), search.plain.peak, shares):
        assert not refuted(search, limit, every)


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_tables_people_know_are_not_faster_on_other_steps(name: str) -> None:
    search = Proposer(seen(SMALL_STEPS[name]()), {"saved": LEVERS["saved"]}, "bitwise", SPEEDS)._search(0)
    tables = [search.packed(dict.fromkeys(search.candidates, way)) for way in (RECOMPUTE, CACHE, DISK)]
    every = [(outcome.peak, outcome.seconds) for outcome in map(search.evaluation.of, tables)]
    assert not any(refuted(search, peak, every) for peak, _ in every)


def test_the_bound_of_a_limit_that_takes_work_is_no_idle_one() -> None:
    """It grows as the limit falls, up to what is beyond every table."""
    search = search_of(network(["wide", "tanh", "wide", "norm", "wide"]))
    bounds = [least_seconds(search, int(search.floor + share * (search.plain.peak - search.floor)), 1.0) for share in (1.0, 0.6, 0.3, 0.0)]
    assert bounds[0] == 0.0 and bounds == sorted(bounds) and len({*bounds}) == 4
    assert least_seconds(search, search.floor - 1, 1.0) == float("inf")


@pytest.mark.parametrize("broken", ["it forgets the other place", "it sees more bytes than there are"])
def test_a_bound_that_asks_too_much_would_be_noticed(broken: str) -> None:
    line = network(["wide", "tanh", "wide", "norm"])
    search = Search(line, 1000 * seconds_of(line.trace, SPEEDS), Speeds(disk=1e13), Away(DISK))
    ops = dict.fromkeys(search.candidates, DISK)
    outcome = search.evaluation.of(ops)
    every = [(outcome.peak, outcome.seconds)]
    assert not refuted(search, outcome.peak, every)
    if broken == "it forgets the other place":
        search.away = Away()
    else:
        search.barest = search.barest + 2 * (search.plain.peak - outcome.peak)  # type: ignore[misc]
    assert refuted(search, outcome.peak, every)


def best_of_all(ours: Proposer, limit: int) -> float:
    """Seconds of the fastest plan there is: every combination with every table."""
    found = []
    for place, combination in enumerate(ours.combinations):
        times = combination.repeats * ours._slower(combination)
        every = everything(ours._search(place))
        found += [ours._base(place) + seconds * times for peak, seconds in every if peak <= limit]
    return min(found)


def small() -> Proposer:
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters(), foreach=True), torch.randn(512, 8))
    ours = Proposer(seen(step), {word: LEVERS[word] for word in ("saved", "microbatch", "optimizer")}, "reordered", Speeds(5e8, 5e8))
    assert len(ours.combinations) > 4 and all(len(ours._search(place).candidates) <= MOST for place in range(len(ours.combinations)))
    return ours


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_no_plan_is_faster_than_the_gap_says(share: float) -> None:
    ours = small()
    lowest, plain = ours.lowest("reordered", 1.0), ours.combinations[0].whole.peak_bytes
    assert lowest is not None
    limit = int(lowest.peak_bytes + share * (plain - lowest.peak_bytes))
    (winner, *others) = ours.propose(lambda combination: limit, 1.0).fitting
    found = compared(ours, winner, [winner, *others], lambda combination: limit, 1.0)
    best = best_of_all(ours, limit)
    assert 0 <= found.gap < 1 and winner.seconds * (1 - found.gap) <= best <= winner.seconds
    worse = Proposal(lowest.combination, lowest.table, 10 * winner.seconds, lowest.process_high_bytes)
    gap = compared(ours, worse, [worse], lambda combination: limit, 1.0).gap
    assert 0.9 * (1 - 1e-9) <= gap < 1 and worse.seconds * (1 - gap) <= best  # what is far from the best says so


def test_without_time_the_gap_is_wider_and_still_holds() -> None:
    limit, gaps = int(0.7 * small().combinations[0].whole.peak_bytes), []
    for seconds in (0.0, 1.0):
        ours = small()
        winner = ours.propose(lambda combination: limit, 1.0).fitting[0]
        gaps.append(compared(ours, winner, [winner], lambda combination: limit, seconds).gap)
        assert winner.seconds * (1 - gaps[-1]) <= best_of_all(ours, limit)
    assert gaps[0] > gaps[1]
