"""From a proposal to a Plan that explains itself: what each lever saves and costs, what lost and why, what could be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf

from memfit.planner.combining import Rewriter
from memfit.planner.comparing import Unchosen
from memfit.planner.proposing import Proposal, Proposals
from memfit.records import EXACTNESS, Alternative, Ledger, Option, Plan, PlannedLever, loosest
from memfit.units import format_bytes

_MOST_SHOWN = 5
_ALMOST = 1.02


def explained_levers(
    plain: Ledger, options: Sequence[Option], levers: Mapping[str, Rewriter], costs: Mapping[str, float]
) -> tuple[PlannedLever, ...]:
    """Each lever with what it takes off the peak and off the process after those before it."""
    rows, ledger = [], plain
    for option in options:
        after = levers[option.lever].rewrite(ledger, option)
        saves, of_process = ledger.peak_bytes - after.peak_bytes, ledger.process_high_bytes - after.process_high_bytes
        cost = costs.get(option.lever)
        rows.append(PlannedLever(option.lever, option.name, option.exactness, saves, cost, option.settings, option.why, of_process))
        ledger = after
    return tuple(rows)


def alternatives(plain: Ledger, winner: Proposal, proposals: Proposals, unchosen: Sequence[Unchosen]) -> tuple[Alternative, ...]:
    """The runners-up, and why they lost: plans that fit first, then what no plan was found for."""
    others = [p for p in proposals.fitting if p is not winner and p.combination.options != winner.combination.options]
    found = (
        Alternative(
            " + ".join([*(o.lever for o in p.combination.options), *(["saved"] if p.table.ops else [])]) or "nothing",
            ", ".join([*(o.name for o in p.combination.options), *([f"{len(p.table.ops)} results not kept"] if p.table.ops else [])]),
            loosest([o.exactness for o in p.combination.options]),
            plain.peak_bytes - p.peak_bytes,
            p.seconds - winner.seconds,
            _why_it_lost(p, winner),
        )
        for p in others
    )
    return tuple(islice(chain(found, (_without_plan(other, winner) for other in unchosen)), _MOST_SHOWN))


def _why_it_lost(loser: Proposal, winner: Proposal) -> str:
    if loser.seconds > winner.seconds * _ALMOST:
        return f"slower by {100 * (loser.seconds / winner.seconds - 1):.0f} %"
    return "no faster, and changes more"


def _without_plan(other: Unchosen, winner: Proposal) -> Alternative:
    options = other.combination.options
    name, option = " + ".join(o.lever for o in options) or "saved", ", ".join(o.name for o in options) or "nothing else"
    return Alternative(name, option, loosest([o.exactness for o in options]), rejected_because=_why_it_has_no_plan(other, winner))


def _why_it_has_no_plan(other: Unchosen, winner: Proposal) -> str:
    if other.seconds == inf:
        return f"does not fit, whichever results are kept: the peak stays {format_bytes(other.excess)} too high, or more"
    if other.seconds > winner.seconds * _ALMOST:
        return f"slower by {100 * (other.seconds / winner.seconds - 1):.0f} % or more, whichever results are kept"
    if other.seconds >= winner.seconds:
        return "no faster, whichever results are kept"
    why = "nothing that fits was found in the time" if other.was_looked_at else "not looked at, the time was over"
    return f"{why}; it could be faster by {100 * (1 - other.seconds / winner.seconds):.0f} % at most"


def without_half(plan: Plan, times_slower: float) -> Plan:
    """A plan for which half precision was not weighed, which says so; what it would reach is not known."""
    if not plan.levers:
        return plan
    why = f"this processor takes {times_slower:.0f} times as long for a convolution in bfloat16 as in float32"
    words = EXACTNESS[EXACTNESS.index("rounded") :]
    reachable, reasons = plan.reachable_bytes | dict.fromkeys(words), plan.not_weighed | dict.fromkeys(words, why)
    missing = Alternative("precision", "bfloat16 autocast", "rounded", rejected_because=f"not weighed: {why}")
    estimated = tuple(word for word in plan.estimated if word not in words)
    told = (*plan.alternatives, missing)
    return replace(plan, alternatives=told, reachable_bytes=reachable, not_weighed=reasons, estimated=estimated)
