"""What a capture that did not fit teaches about the next proposals."""

from __future__ import annotations

from dataclasses import replace

from memfit.ledger import account
from memfit.levers import LEVERS
from memfit.levers.lever import trace_of
from memfit.planner.learning import Learnt
from memfit.planner.proposing import Proposal, Proposer, beside_the_peak
from memfit.records import Ledger, Option, Process, Speeds
from quick_ledgers import seen
from small_steps import dense

BUDGET = 2**30


def proposer() -> Proposer:
    """On a heap that holds as much again as is asked for."""
    levers = {name: LEVERS[name] for name in ("saved", "microbatch", "optimizer")}
    trace = trace_of(seen(dense()))
    peak = account(trace).peak_bytes
    return Proposer(account(replace(trace, process=Process(2**20, 0, peak, peak))), levers, "reordered", Speeds())


def proposal_of(ours: Proposer, *words: str) -> Proposal:
    return next(ours._untouched(n) for n, c in enumerate(ours.combinations) if c.words == frozenset(words))


def captured(proposal: Proposal, higher: int = 0, more: int = 0) -> Ledger:
    """The proposal's own ledger, had its peak been higher, or the heap held more beside it."""
    ledger = proposal.combination.ledger
    return replace(ledger, peak_bytes=ledger.peak_bytes + higher, process_high_bytes=ledger.process_high_bytes + higher + more)


def test_a_peak_that_came_out_higher_lowers_the_limit_for_the_same_levers_only() -> None:
    ours = proposer()
    plain, divided = proposal_of(ours), proposal_of(ours, "microbatch")
    before, after = Learnt(BUDGET), Learnt(BUDGET)
    after.from_capture(divided, captured(divided, higher=2**20))
    assert after(plain.combination) == before(plain.combination)
    assert before(divided.combination) - after(divided.combination) == 2 * 2**20  # by so much and a little more


def test_a_heap_that_held_more_is_expected_to_with_other_levers_that_leave_it_alone() -> None:
    ours = proposer()
    plain, other = proposal_of(ours), proposal_of(ours, "optimizer")
    divided, told = (
        proposal_of(ours, "microbatch"),
        replace(plain.combination, options=(Option("allocator", "holes given back", "bitwise"),)),
    )
    fixed, _ = beside_the_peak(plain.combination.ledger)
    budget = fixed + 2 * plain.peak_bytes
    before, after = Learnt(budget), Learnt(budget)
    after.from_capture(plain, captured(plain, more=plain.peak_bytes))
    assert after(other.combination) < before(other.combination)
    assert after(divided.combination) == before(divided.combination) and after(told) == before(told)


def test_after_a_second_surprise_nothing_is_hoped_for() -> None:
    """As much beside any peak as was seen, then."""
    ours = proposer()
    plain = proposal_of(ours)
    fixed, _ = beside_the_peak(plain.combination.ledger)
    budget = fixed + 4 * plain.peak_bytes
    learnt, seen_once = Learnt(budget), captured(plain, more=3 * plain.peak_bytes)
    learnt.from_capture(plain, seen_once)
    once = learnt(plain.combination)
    learnt.from_capture(plain, seen_once)
    slack = seen_once.process_high_bytes - fixed - seen_once.peak_bytes
    assert learnt(plain.combination) == budget - fixed - slack - 2**20 < once


def test_a_heap_that_holds_more_the_lower_the_peak_is_left_to_other_levers() -> None:
    """A table took a fifth off the peak and nothing off the process: what would be asked of another one is out of all reach."""
    ours = proposer()
    plain = proposal_of(ours)
    fixed, _ = beside_the_peak(plain.combination.ledger)
    learnt = Learnt(fixed + 2 * plain.peak_bytes)
    fifth = plain.peak_bytes // 5
    learnt.from_capture(plain, captured(plain, more=fifth))
    once = learnt(plain.combination)
    learnt.from_capture(plain, captured(plain, higher=-fifth, more=2 * fifth))
    assert once + 2**20 > plain.peak_bytes // 2 and learnt(plain.combination) + 2**20 < 0  # a little lower is asked for, always


def test_what_a_lower_peak_took_off_the_process_is_what_the_next_is_expected_to() -> None:
    ours = proposer()
    plain = proposal_of(ours)
    fixed, _ = beside_the_peak(plain.combination.ledger)
    tenth = plain.peak_bytes // 10
    budget = fixed + 2 * plain.peak_bytes - 2 * tenth
    learnt = Learnt(budget)
    learnt.from_capture(plain, captured(plain))
    learnt.from_capture(plain, captured(plain, higher=-2 * tenth, more=tenth))  # a half of it
    need = captured(plain, higher=-2 * tenth, more=tenth).process_high_bytes - budget
    assert abs(plain.peak_bytes - 2 * tenth - 2 * need - 2**20 - learnt(plain.combination)) < 2**10
