"""What to say when nothing fits: the lowest that can be reached, what fills it, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from memfit.errors import Infeasible
from memfit.planner.combining import Rewriter
from memfit.records import EXACTNESS, Ledger
from memfit.units import format_bytes

_DEVICES = (2, 4, 8)
_WORTH_IT = 0.9  # of the lowest: less is not worth other machines
_HOLDERS = 3


def infeasible(
    budget: int, best: Ledger, plain: Ledger, allowed: str, reachable: dict[str, int], variants: Mapping[str, int], split: Rewriter | None
) -> Infeasible:
    """`best` is the lowest that was captured. `variants` are what the step's own take, and `split` is the lever that divides a batch."""
    lowest = best.process_high_bytes
    help_, least = [], lowest
    for word in EXACTNESS[EXACTNESS.index(allowed) + 1 :]:
        if reachable.get(word, least) < least:  # what a stricter class reaches as well is no reason to allow a looser one
            least = reachable[word]
            help_.append(f"allow {word}: {format_bytes(least, up=True)}")
    smaller = {name: size for name, size in variants.items() if size < lowest}
    help_ += [f"the variant {name!r}, as it is: {format_bytes(size, up=True)} (another training)" for name, size in smaller.items()]
    help_ += devices_that_would_help(plain, best, budget, split)
    help_ += [f"a budget of {format_bytes(lowest, up=True)} or more", "a smaller batch or model"]
    listed = "".join(f"\n  - {what}" for what in help_)
    message = (
        f"This step does not fit {format_bytes(budget)}: the lowest that can be reached with {allowed} techniques is "
        f"{format_bytes(lowest, up=True)} (upper end of the prediction).\n{what_fills(best)}\nWhat would help:{listed}"
    )
    return Infeasible(message, lowest, reachable)


def what_fills(best: Ledger) -> str:
    """Everything in the upper end of its process, and who holds most of its peak."""
    process, kinds = best.process, sorted(best.by_category.items(), key=lambda kind: -kind[1])
    parts = {"interpreter and libraries": process.base_bytes, "loader workers": process.workers_bytes, **dict(kinds)}
    parts["what the allocator may hold beside them"] = best.process_high_bytes - sum(parts.values())
    filled = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts.items() if size > 0)
    held: Counter[tuple[str, str]] = Counter()
    for owner in best.at_peak:
        held[owner.category, " ".join(filter(None, (owner.module, f"({owner.source})" if owner.source else "")))] += owner.bytes
    most = ", ".join(f"{kind} {format_bytes(size)} of {where or 'the step'}" for (kind, where), size in held.most_common(_HOLDERS))
    return f"What fills it: {filled}." + (f"\nMost of its peak: {most}." if most else "")


def devices_that_would_help(plain: Ledger, best: Ledger, budget: int, split: Rewriter | None) -> Iterator[str]:
    """The fewest devices on which it would fit: each with a part of the batch, or of what all keep of the lowest that was captured."""
    if split is None:
        return
    lowest = best.process_high_bytes
    options = {-(-plain.batch_size // option.settings["size"]): option for option in split.options(plain)}
    parts = {n: split.rewrite(plain, options[n]).process_high_bytes for n in _DEVICES if n in options}
    if (found := _fewest(parts, budget)) and found[1] < lowest:
        yield f"{found[0]} devices with a part of the batch each: about {format_bytes(found[1])} each (data parallel, an estimate)"
    kept = sum(best.by_category[kind] for kind in ("parameters", "gradients", "optimizer"))
    shared = {n: lowest - kept * (n - 1) // n for n in _DEVICES if options}
    if (found := _fewest(shared, budget)) and found[1] < _WORTH_IT * lowest:
        yield (
            f"{found[0]} devices that also share parameters, gradients and optimizer states: about {format_bytes(found[1])} each "
            "(sharded data parallel, an estimate)"
        )


def _fewest(sizes: Mapping[int, int], budget: int) -> tuple[int, int] | None:
    return min(((n, size) for n, size in sizes.items() if size <= budget), default=None)
