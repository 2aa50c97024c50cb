"""From a proposal to a Plan that explains itself: what each lever saves and costs, what lost and why, what could be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf

from memfit.errors import Infeasible
from memfit.planner.combining import Rewriter
from memfit.planner.comparing import Unchosen
from memfit.planner.proposing import Proposal, Proposals
from memfit.records import EXACTNESS, Alternative, Ledger, Option, Plan, PlannedLever, loosest
from memfit.units import format_bytes

_MOST_SHOWN = 5
_ALMOST = 1.02
_DEVICES = (2, 4, 8)
_WORTH_IT = 0.9  # of the lowest: less is not worth other machines


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


def infeasible(
    budget: int, lowest: int, plain: Ledger, allowed: str, reachable: dict[str, int], variants: Mapping[str, int], split: Rewriter | None
) -> Infeasible:
    """What to say when nothing fits. `variants` are what the step's own take, and `split` is the lever that divides a batch."""
    process = plain.process
    parts = {
        "interpreter and libraries": process.base_bytes,
        "loader workers": process.workers_bytes,
        "parameters, gradients and optimizer": _kept_by_all(plain),
    }
    filled = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items() if size)
    help_, least = [], lowest
    for word in EXACTNESS[EXACTNESS.index(allowed) + 1 :]:
        if reachable.get(word, least) < least:  # what a stricter class reaches as well is no reason to allow a looser one
            least = reachable[word]
            help_.append(f"allow {word}: {format_bytes(least, up=True)}")
    smaller = {name: size for name, size in variants.items() if size < lowest}
    help_ += [f"the variant {name!r}, as it is: {format_bytes(size, up=True)} (another training)" for name, size in smaller.items()]
    help_ += devices_that_would_help(plain, budget, lowest, split)
    help_ += [f"a budget of {format_bytes(lowest, up=True)} or more", "a smaller batch or model"]
    listed = "".join(f"\n  - {what}" for what in help_)
    message = (
        f"This step does not fit {format_bytes(budget)}: the lowest that can be reached with {allowed} techniques is "
        f"{format_bytes(lowest, up=True)} (upper end of the prediction).\n"
        f"What fills it: {filled}; the rest is the highest moment of the passes.\nWhat would help:{listed}"
    )
    return Infeasible(message, lowest, reachable)


def devices_that_would_help(plain: Ledger, budget: int, lowest: int, split: Rewriter | None) -> Iterator[str]:
    """The fewest devices on which it would fit, or the most that are thought of: each with a part of the batch, or of what all keep."""
    if split is None:
        return
    options = {-(-plain.batch_size // option.settings["size"]): option for option in split.options(plain)}
    parts = {n: split.rewrite(plain, options[n]).process_high_bytes for n in _DEVICES if n in options}
    if (found := _fewest(parts, budget)) and found[1] < lowest:
        yield f"{found[0]} devices with a part of the batch each: about {format_bytes(found[1])} each (data parallel, an estimate)"
    shared = {n: lowest - _kept_by_all(plain) * (n - 1) // n for n in _DEVICES if options}
    if (found := _fewest(shared, budget)) and found[1] < _WORTH_IT * lowest:
        yield (
            f"{found[0]} devices that also share parameters, gradients and optimizer states: about {format_bytes(found[1])} each "
            "(sharded data parallel, an estimate)"
        )


def _fewest(sizes: Mapping[int, int], budget: int) -> tuple[int, int] | None:
    enough = [(n, size) for n, size in sizes.items() if size <= budget]
    return min(enough, default=max(sizes.items(), default=None))


def _kept_by_all(plain: Ledger) -> int:
    return sum(plain.by_category[k] for k in ("parameters", "gradients", "optimizer"))
