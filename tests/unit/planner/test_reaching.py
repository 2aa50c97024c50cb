"""What each class could reach, the looser ones that nobody allowed as well."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from memfit import Step
from memfit.levers import LEVERS
from memfit.planner.combining import Rewriter
from memfit.planner.proposing import Proposer
from memfit.planner.reaching import Reaching
from memfit.records import EXACTNESS, Ledger, Speeds
from quick_ledgers import seen
from small_steps import sgd


def wide() -> Ledger:
    net = nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 1))
    return seen(Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(4, 1024, 16)))


def reaching(ledger: Ledger, allowed: str, asked: list[str], *words: str) -> Reaching:
    levers = {word: LEVERS[word] for word in words}

    def proposer_of(some: Mapping[str, Rewriter], word: str) -> Proposer:
        asked.append(word)
        return Proposer(ledger, some, word, Speeds())

    return Reaching(ledger, levers, allowed, Proposer(ledger, levers, allowed, Speeds()), proposer_of)


def test_looser_classes_reach_lower_with_what_they_bring_and_the_same_without() -> None:
    ledger, asked = wide(), list[str]()
    ours = reaching(ledger, "bitwise", asked, "saved", "microbatch", "precision")
    allowed = ours.with_allowed(ledger.process_high_bytes, 0.3)
    looser = ours.with_looser(allowed["bitwise"], 0.3)
    assert tuple({**allowed, **looser}) == EXACTNESS
    assert allowed["bitwise"] > looser["reordered"] == looser["redrawn"] > looser["rounded"] == looser["altered"] > 0
    assert asked == ["reordered", "rounded"]  # the others bring nothing, so nobody looks


def test_half_precision_is_taken_at_its_guess_where_nothing_is_promised() -> None:
    """Its upper end is as wide as the guess itself, and would hide what it gives: a promise is made with it all the same."""
    ledger = wide()
    ours = reaching(ledger, "reordered", [], "saved", "precision")
    lowest = ours.with_allowed(ledger.process_high_bytes, 0.3)["reordered"]
    halves = reaching(ledger, "rounded", [], "saved", "precision").proposer.combinations[-1].ledger
    assert halves.high_bytes > 1.2 * halves.peak_bytes
    guess, promise = ours.with_looser(lowest, 0.3)["rounded"], ours.with_looser(lowest, 0.3, captured=lowest)["rounded"]
    assert 0.5 * lowest < guess < 0.8 * lowest < promise <= lowest


def test_what_is_captured_is_only_compared_with_what_was() -> None:
    ledger, more = wide(), 2**20
    ours = reaching(ledger, "bitwise", [], "saved", "microbatch")
    lowest = ours.with_allowed(ledger.process_high_bytes, 0.3)["bitwise"]
    weighed = ours.with_looser(lowest, 0.3)["reordered"]
    assert weighed < lowest and ours.with_looser(lowest + more, 0.3, captured=lowest + more)["reordered"] == weighed + more


def test_a_looser_class_never_reaches_less_than_what_was_captured_without() -> None:
    ledger = wide()
    assert reaching(ledger, "reordered", [], "saved", "precision").with_looser(7, 0.3) == {"redrawn": 7, "rounded": 7, "altered": 7}
