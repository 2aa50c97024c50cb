"""A plan's rows, and what a step takes with them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.capture.process import warmed_up_once
from memfit.fitting.applying import apply_levers, option_of
from memfit.levers import Lever
from memfit.levers.saved import table_option
from memfit.levers.saved.words import words_of
from memfit.planner.proposing import Proposal
from memfit.profiling import profile
from memfit.records import Ledger, Option, PlannedLever
from memfit.step import Step


def options_of(proposal: Proposal) -> tuple[Option, ...]:
    """The levers of a proposal, in order; its table of saved tensors is the last."""
    trace = proposal.combination.ledger.trace
    assert trace is not None
    ops = proposal.table.ops
    if not ops:
        return proposal.combination.options
    return (*proposal.combination.options, table_option(trace, ops, f"{len(ops)} results not kept", words_of(trace, ops)))


def captured(step: Step, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], plain: Ledger, device: str | None = None) -> Ledger:
    """The ledger of a step with a plan's levers on; what was measured as a whole needs no capture."""
    if is_measured_as_a_whole(rows):
        return rewritten_by(plain, rows, levers)
    with apply_levers(step, rows, levers):
        return warmed_up_once(profile(step, simulate=True, device=device), plain)


def is_measured_as_a_whole(rows: Sequence[PlannedLever]) -> bool:
    """Whether the peak with these levers was measured before they were planned: a compiler's can be known in no other way."""
    return any("measured_peak_bytes" in lever.settings for lever in rows)


def rewritten_by(ledger: Ledger, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> Ledger:
    """The ledger that a plan's levers make of a plain step's, one after the other."""
    for lever in rows:
        ledger = levers[lever.name].rewrite(ledger, option_of(lever))
    return ledger


def rows_of(options: Sequence[Option]) -> list[PlannedLever]:
    """Options as rows of a plan, before what each saves is known."""
    return [PlannedLever(o.lever, o.name, o.exactness, settings=o.settings, why=o.why) for o in options]
