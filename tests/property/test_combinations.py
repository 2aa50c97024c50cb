"""What goes around a table of saved tensors: the proposer against every combination with every table, and at other budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_planner import KINDS, choices, everything
from torch import nn

from memfit import Ledger, Step
from memfit.ledger import account
from memfit.levers import LEVERS
from memfit.planner.costs import seconds_of
from memfit.planner.learning import Learnt
from memfit.planner.proposing import Proposal, Proposer
from memfit.records import Process, Speeds
from quick_ledgers import seen

MIB = 2**20
SPEEDS = Speeds()
FEW = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2)
MANY = st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=3)
PATIENT = [HealthCheck.filter_too_much, HealthCheck.too_slow]


def ledger_of(kinds: Sequence[str], batch: int) -> Ledger:
    """As it is after timing, in a process whose heap holds up to half as much again; what parts cost beside the whole is made up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), *(KINDS[kind]() for kind in kinds), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    plain = seen(Step(net, lambda m, x: m(x).pow(2).mean(), optimizer, torch.randn(batch, 8)))
    assert plain.trace is not None
    process = Process(4 * MIB, slack_bytes=plain.peak_bytes // 5, slack_high_bytes=plain.peak_bytes // 2)
    seconds, costs = float(seconds_of(plain.trace, SPEEDS).sum()), ((1, 1.4), (8, 1.15))
    return account(replace(plain.trace, process=process, step_seconds=seconds, part_costs=costs, fresh_bytes_a_second=5e9), causes=False)


def proposer(ledger: Ledger, *words: str) -> Proposer:
    return Proposer(ledger, {word: LEVERS[word] for word in words}, "reordered", SPEEDS)


def best(ledger: Ledger, budget: int, *words: str) -> Proposal | None:
    """As a plan of its own finds it, which knows nothing of others."""
    return next(iter(proposer(ledger, *words).propose(Learnt(budget), 5.0).fitting), None)


def budgets(ledger: Ledger, shares: Sequence[float], *words: str) -> list[int]:
    lowest = proposer(ledger, *words).lowest("reordered", 2.0)
    assert lowest is not None
    return sorted(int(lowest.process_high_bytes + share * (ledger.process_high_bytes - lowest.process_high_bytes)) for share in shares)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=PATIENT)
@given(FEW, st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3))
def test_with_micro_batches_it_finds_what_trying_everything_finds(kinds: list[str], shares: list[float]) -> None:
    """Every size of a micro-batch with every table on its line."""
    ledger = ledger_of(kinds, batch=128)
    ours = proposer(ledger, "saved", "microbatch")
    searches = [ours._search(place) for place in range(len(ours.combinations))]
    assume(all(len(choices(search)) <= 4 for search in searches))
    every = [(place, *outcome) for place, search in enumerate(searches) for outcome in everything(search)]
    for budget in budgets(ledger, [0.1, *shares], "saved", "microbatch"):
        limit = Learnt(budget)
        fitting = (seconds_with(ours, place, seconds) for place, peak, seconds in every if peak <= limit(ours.combinations[place]))
        fastest, found = min(fitting, default=None), best(ledger, budget, "saved", "microbatch")
        assert found is None if fastest is None else found is not None and found.seconds == pytest.approx(fastest, rel=1e-9)


def seconds_with(ours: Proposer, place: int, table: float) -> float:
    """Of the step, with a table that adds some to the line of each micro-batch."""
    untouched, parts = ours._untouched(place), ours.combinations[place]
    return untouched.seconds + table * parts.repeats * ours._slower(parts)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=PATIENT)
@given(MANY, st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_a_larger_budget_never_gives_a_slower_proposal(kinds: list[str], shares: list[float]) -> None:
    ledger, words = ledger_of(kinds, batch=128), ("saved", "microbatch", "allocator", "optimizer")
    found = [best(ledger, budget, *words) for budget in budgets(ledger, shares, *words)]
    seconds = [proposal.seconds for proposal in found if proposal]
    assert len(seconds) > 2 and seconds == sorted(seconds, reverse=True)
    assert all(later for proposal, later in pairwise(found) if proposal)


@pytest.mark.parametrize("words", [("saved",), ("microbatch",)])
def test_a_proposer_without_one_of_its_levers_would_be_noticed(words: tuple[str]) -> None:
    ledger = ledger_of(["tanh", "norm", "linear"], batch=128)
    (budget,) = budgets(ledger, [0.2], "saved", "microbatch")
    whole, broken = best(ledger, budget, "saved", "microbatch"), best(ledger, budget, *words)
    assert whole is not None and (broken is None or broken.seconds > 1.01 * whole.seconds)
