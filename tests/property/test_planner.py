"""The planner on small random networks: it finds what trying everything finds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step
from memfit.ledger import account
from memfit.levers import LEVERS
from memfit.levers.saved import table_option
from memfit.levers.saved.line import Line, line_of
from memfit.levers.saved.rewriting import with_remakings
from memfit.levers.saved.schedule import schedule
from memfit.levers.saved.table import BITS, CACHE, DISK, RECOMPUTE, TIMES
from memfit.planner.away import Away, away_from
from memfit.planner.costs import seconds_of
from memfit.planner.search import Search
from memfit.records import Speeds
from quick_ledgers import seen
from small_steps import SMALL_STEPS, sgd

SPEEDS = Speeds()
KINDS = {
    "linear": lambda: nn.Linear(32, 32),
    "wide": lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)),
    "norm": lambda: nn.LayerNorm(32),
    "tanh": nn.Tanh,
    "relu_": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.2),
}
NETWORKS = st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=7)
SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=2)
PATIENT = [HealthCheck.filter_too_much, HealthCheck.too_slow]
quickly = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=PATIENT)


def network(kinds: list[str]) -> Line:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), *(KINDS[kind]() for kind in kinds), nn.Linear(32, 1))
    trace = seen(Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(128, 8))).trace
    assert trace is not None
    return line_of(trace)


def search_of(line: Line, disk: bool = False) -> Search:
    return Search(line, seconds_of(line.trace, SPEEDS), SPEEDS, away_from("cpu") if disk else Away())


def everything(search: Search) -> list[tuple[int, float]]:
    """Peak and seconds of every table: each result kept, made again with every count, put away where there is a place, masks packed."""
    packed, again = dict.fromkeys(search.masks, (BITS,)), dict.fromkeys(search.candidates, search.ways)
    words = {op: [None, *again.get(op, ()), *packed.get(op, ())] for op in choices(search)}
    tables = ({op: word for op, word in zip(words, chosen, strict=True) if word} for chosen in product(*words.values()))
    outcomes = (search.evaluation.of({**search.always, **ops}) for ops in tables)
    return [(outcome.peak, outcome.seconds) for outcome in outcomes]


def choices(search: Search) -> list[int]:
    """The ops that are decided about."""
    return sorted({*search.candidates, *search.masks})


def fastest_of(every: list[tuple[int, float]], limit: int) -> float:
    return min(seconds for peak, seconds in every if peak <= limit)


def limits(low: int, high: int, shares: list[float]) -> list[int]:
    return sorted(int(low + share * (high - low)) for share in shares)


@quickly
@given(NETWORKS, SHARES, st.booleans())
def test_it_finds_what_trying_everything_finds(kinds: list[str], shares: list[float], disk: bool) -> None:
    search = search_of(network(kinds), disk)
    assume(1 <= len(search.candidates) and len(choices(search)) <= 5)
    every = everything(search)
    for limit in limits(min(peak for peak, _ in every), search.plain.peak, [0.0, *shares]):
        found = search_of(search.evaluation.line, disk).fastest(limit, 20.0)
        assert found is not None and found.peak <= limit
        assert found.seconds == pytest.approx(fastest_of(every, limit), rel=1e-9)


@pytest.mark.parametrize("kinds", [["linear", "wide"], ["wide", "dropout"]])
def test_it_finds_what_trying_everything_finds_where_counts_and_masks_matter(kinds: list[str]) -> None:
    search = search_of(network(kinds), disk=True)
    every = everything(search)
    for limit in limits(min(peak for peak, _ in every), search.plain.peak, [0.0, 0.1, 0.3, 0.6, 0.9]):
        found = search.fastest(limit, 20.0)
        assert found is not None and found.seconds == pytest.approx(fastest_of(every, limit), rel=1e-9)


@pytest.mark.parametrize(
    ("kinds", "broken"),
    [(["tanh", "norm"], ("_FEW", 0)), (["linear", "wide"], ("_other_counts", lambda *_: ()))],
    ids=["every way", "every count"],
)
def test_a_search_that_does_not_try_everything_would_be_noticed(
    kinds: list[str], broken: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes single decisions as long as that helps stops short of the fastest."""
    monkeypatch.setattr(f"memfit.planner.every_table.{broken[0]}", broken[1])
    search = search_of(network(kinds), disk=True)
    every = everything(search)
    found = search.fastest(limit := min(peak for peak, _ in every), 20.0)
    assert found is None or found.seconds > fastest_of(every, limit) * (1 + 1e-3)


@quickly
@given(NETWORKS, SHARES, st.booleans())
def test_a_larger_limit_is_never_slower(kinds: list[str], shares: list[float], disk: bool) -> None:
    search = search_of(network(kinds), disk)
    lowest = search.lowest(0.5)
    before = np.inf
    for limit in limits(lowest.peak, search.plain.peak, shares):
        found = search.fastest(limit, 1.0)
        assert found is not None and found.seconds <= before
        before = found.seconds


@quickly
@given(NETWORKS)
def test_a_limit_above_the_need_decides_nothing(kinds: list[str]) -> None:
    search = search_of(network(kinds))
    found = search.fastest(search.plain.peak)
    assert found is not None and found.ops == {} and found.seconds == 0.0


@quickly
@given(NETWORKS)
def test_no_table_is_below_the_floor_and_the_lowest_is_near_it(kinds: list[str]) -> None:
    search = search_of(network(kinds))
    assume(1 <= len(search.candidates) and len(choices(search)) <= 5)
    lowest = min(peak for peak, _ in everything(search))
    assert search.floor <= lowest <= search.plain.peak
    assert search.lowest(20.0).peak == lowest


@settings(max_examples=40, deadline=None, derandomize=True)
@given(NETWORKS, st.lists(st.sampled_from([None, RECOMPUTE, *TIMES, DISK, BITS]), min_size=1, max_size=6))
def test_the_quick_evaluation_is_the_ledgers(kinds: list[str], words: list[str | None]) -> None:
    line = network(kinds)
    ops = {op: word for place, op in enumerate(sorted(line.made)) if (word := words[place % len(words)])}
    search = search_of(line)
    outcome = search.evaluation.of(ops)
    assert search.floor <= search.evaluation.of({**search.always, **{op: ops[op] for op in ops if op in search.candidates}}).peak
    assert outcome.peak == account(with_remakings(line, schedule(line, ops))).peak_bytes
    assert outcome.alive.max() == outcome.peak and outcome.seconds >= 0


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_the_quick_evaluation_of_other_steps(name: str) -> None:
    trace = seen(SMALL_STEPS[name]()).trace
    assert trace is not None
    line = line_of(trace)
    search = search_of(line)
    for word in (RECOMPUTE, *TIMES, DISK, BITS):
        assert search.floor <= search.evaluation.of({**search.always, **dict.fromkeys(search.candidates, word)}).peak
        ops = dict.fromkeys(sorted(line.made), word)
        assert search_of(line).evaluation.of(ops).peak == account(with_remakings(line, schedule(line, ops))).peak_bytes


def test_an_evaluation_that_forgets_remakings_would_be_noticed() -> None:
    line = network(["wide", "tanh", "wide", "norm"])
    ops = dict.fromkeys(sorted(line.made), RECOMPUTE)
    without = schedule(line, ops)
    without.pieces.clear()
    assert search_of(line).evaluation.of(ops).peak != account(with_remakings(line, without)).peak_bytes


def test_a_decision_costs_something_by_itself_and_so_does_every_call_that_is_watched() -> None:
    line = network(["linear", "tanh", "linear", "tanh", "linear"])
    search = Search(line, np.zeros(len(line.trace.ops)), SPEEDS, Away())
    first, second, *_ = (op for op in search.candidates if line.trace.ops[op].name == "aten.tanh.default")
    nothing, one, two = (search.evaluation.of(dict.fromkeys(ops, CACHE)).seconds for ops in ((), (first,), (first, second)))
    assert nothing == 0.0
    assert one > len(line.trace.saved) * 1e-6  # hooks see every tensor that autograd saves, whatever is decided
    assert one < two < 2 * one


def test_masks_are_packed_only_where_that_is_worth_its_time() -> None:
    line = network(["linear", "dropout", "dropout", "dropout", "linear"])
    seconds = 1000 * seconds_of(line.trace, SPEEDS)  # of ops for which what a decision costs by itself is nothing
    dear = Search(line, seconds, Speeds(bits=1e3), Away())
    cheap = Search(line, seconds, Speeds(bits=1e15), Away())
    limit = int(0.95 * dear.plain.peak)
    without, packed = dear.fastest(limit), cheap.fastest(limit)
    assert without is not None and BITS not in without.ops.values()
    assert packed is not None and BITS in packed.ops.values()


def residual() -> Step:
    """The sum goes through a padding, so autograd keeps neither it nor what it was made of: a decision about it would be idle."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    net = nn.ModuleList([nn.GroupNorm(2, 8), first, last])

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        norm, inner, outer = model  # type: ignore[misc]
        for _ in range(4):
            x = outer(nn.functional.pad(x + inner(nn.functional.silu(norm(x))), (1, 1, 1, 1)))
        return x.pow(2).mean()

    return Step(net, loss, sgd(net), torch.randn(2, 8, 48, 48))


def test_a_decision_that_nobody_asks_for_again_is_dropped_and_would_hold_nothing() -> None:
    step = residual()
    ledger = memfit.profile(step, simulate=True)
    assert ledger.trace is not None
    search = search_of(line_of(ledger.trace))

    def named(name: str) -> list[int]:
        return [op for op in search.candidates if ledger.trace is not None and ledger.trace.ops[op].name == name]

    def captured(ops: dict[int, str]) -> int:
        assert ledger.trace is not None
        with LEVERS["saved"].apply(step, table_option(ledger.trace, ops, "a table")):
            return memfit.profile(step, simulate=True).peak_bytes

    ops = dict.fromkeys((*named("aten.native_group_norm.default"), *named("aten.silu.default")), CACHE)
    idle = {**ops, **dict.fromkeys(named("aten.add.Tensor"), RECOMPUTE)}
    table, _ = search.tried(idle)
    assert len(idle) > len(ops) == 8 and table.ops == ops
    assert captured(ops) == captured(idle) == pytest.approx(table.peak, rel=1e-3)  # but for a norm's means and deviations
    assert search.evaluation.of(idle).peak == table.peak


def test_a_search_without_time_still_finds_something() -> None:
    """What frees most for its seconds, one after the other: all that there is time for on a deep network."""
    search = search_of(network(["wide", "tanh", "norm", "wide", "tanh", "linear", "norm"]))
    limit = (search.plain.peak + search.floor) // 2
    found = search.fastest(limit, 0.05)
    assert found is not None and found.peak <= limit


def test_a_search_that_only_asks_the_programme_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Following single changes and choices is what finds the lowest tables: without it a limit that can be kept is out of reach."""
    monkeypatch.setattr(Search, "_descend", lambda self, limit, soon, deadline: None)
    monkeypatch.setattr("memfit.planner.search._FEW", 0)
    search = search_of(network(["linear", "tanh", "tanh", "tanh", "norm", "relu_"]))
    lowest = min(peak for peak, _ in everything(search))
    assert search.floor <= lowest < search.plain.peak and search.fastest(lowest) is None


def test_a_floor_that_forgets_when_results_are_read_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no limit would ever be called hopeless: it is as low as if nothing had to be there for backward."""
    plain = search_of(network(["wide", "tanh", "wide", "norm"])).floor
    monkeypatch.setattr("memfit.planner.candidates.windows_of", lambda line, storages: ())
    assert search_of(network(["wide", "tanh", "wide", "norm"])).floor < plain
