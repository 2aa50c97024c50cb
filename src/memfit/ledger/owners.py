"""Who holds memory at the peak, and in which category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from memfit.ledger.timeline import alive_at
from memfit.records import CATEGORIES, Owner, Storage, Trace


def owners_at(trace: Trace, op: int) -> tuple[Owner, ...]:
    """Everything alive while an op runs, largest first; the op's own workspace is one of them."""
    saved = {kept.storage for kept in trace.saved}
    owners = [_owner(trace, storage, number in saved) for number, storage in alive_at(trace, op) if storage.bytes]
    running = trace.ops[op]
    if running.workspace:
        inside = f"{running.name} (workspace)"
        owners.append(Owner(running.workspace, "temporaries", inside, running.module, running.source))
    return tuple(sorted(owners, key=lambda owner: -owner.bytes))


def _owner(trace: Trace, storage: Storage, saved: bool) -> Owner:
    category = category_of(trace, storage, saved)
    if storage.born < 0:
        return Owner(storage.bytes, category, "", storage.name, "")
    op = trace.ops[storage.born]
    return Owner(storage.bytes, category, op.name, op.module or storage.name, op.source)


def category_of(trace: Trace, storage: Storage, saved: bool) -> str:
    """The step's word for a storage, or, for one made in the step: kept for backward, or only passing."""
    if storage.kind:
        return storage.kind
    if storage.born < 0:
        return "other"
    return "activations" if saved and trace.ops[storage.born].phase == "forward" else "temporaries"


def by_category(owners: Iterable[Owner]) -> dict[str, int]:
    """Bytes a category, every category named."""
    return dict.fromkeys(CATEGORIES, 0) | dict(_sums(owners, lambda owner: owner.category))


def by(owners: Iterable[Owner], label: Callable[[Owner], str]) -> dict[str, int]:
    """Bytes by any label, the largest first; what has no such label is under ''."""
    return dict(_sums(owners, label).most_common())


def _sums(owners: Iterable[Owner], label: Callable[[Owner], str]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for owner in owners:
        sums[label(owner)] += owner.bytes
    return sums
