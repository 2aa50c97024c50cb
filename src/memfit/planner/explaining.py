"""From a proposal to a Plan that explains itself: what each lever saves and costs, what lost and why, what could be reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.errors import Infeasible
from memfit.planner.combining import Rewriter
from memfit.planner.proposing import Proposal, Proposals
from memfit.records import EXACTNESS, Alternative, Ledger, Option, PlannedLever, loosest
from memfit.units import format_bytes

_MOST_SHOWN = 5
_ALMOST = 1.02


def planned_levers(
    plain: Ledger, options: Sequence[Option], levers: Mapping[str, Rewriter], costs: Mapping[str, float]
) -> tuple[PlannedLever, ...]:
    """Each lever with what it takes off the peak after those before it."""
    rows, ledger = [], plain
    for option in options:
        after = levers[option.lever].rewrite(ledger, option)
        saves = ledger.peak_bytes - after.peak_bytes
        rows.append(PlannedLever(option.lever, option.name, option.exactness, saves, costs.get(option.lever), option.settings, option.why))
        ledger = after
    return tuple(rows)


def alternatives(winner: Proposal, proposals: Proposals) -> tuple[Alternative, ...]:
    """The runners-up, and why they lost."""
    others = [p for p in proposals.fitting if p is not winner and p.combination.options != winner.combination.options]
    return tuple(
        Alternative(
            " + ".join([*(o.lever for o in p.combination.options), *(["saved"] if p.table.ops else [])]) or "nothing",
            ", ".join([*(o.name for o in p.combination.options), *([f"{len(p.table.ops)} results not kept"] if p.table.ops else [])]),
            loosest([o.exactness for o in p.combination.options]),
            0,
            p.seconds - winner.seconds,
            _why_it_lost(p, winner),
        )
        for p in others[:_MOST_SHOWN]
    )


def _why_it_lost(loser: Proposal, winner: Proposal) -> str:
    if loser.seconds > winner.seconds * _ALMOST:
        return f"slower by {100 * (loser.seconds / winner.seconds - 1):.0f} %"
    return "no faster, and changes more"


def infeasible(budget: int, lowest: int, plain: Ledger, allowed: str, reachable: dict[str, int]) -> Infeasible:
    """What to say when nothing fits."""
    process = plain.process
    parts = {
        "interpreter and libraries": process.base_bytes,
        "loader workers": process.workers_bytes,
        "parameters, gradients and optimizer": sum(plain.by_category[k] for k in ("parameters", "gradients", "optimizer")),
    }
    filled = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items() if size)
    looser = [c for c in EXACTNESS[EXACTNESS.index(allowed) + 1 :] if reachable.get(c, lowest) < lowest]
    help_ = "".join(f"\n  - allow {c}: {format_bytes(reachable[c])}" for c in looser)
    message = (
        f"This step does not fit {format_bytes(budget)}: the lowest that can be reached with {allowed} techniques is "
        f"{format_bytes(lowest)} (upper end of the prediction).\nWhat fills it: {filled}; the rest is the highest moment of the passes."
        f"\nWhat would help:{help_}\n  - a budget of {format_bytes(lowest)} or more\n  - a smaller batch or model"
    )
    return Infeasible(message, lowest, reachable)
