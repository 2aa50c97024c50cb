"""Who holds memory at the peak, and in which category."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate

from memfit.ledger.timeline import alive_at, last_op
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


def most_by_module(trace: Trace) -> dict[str, int]:
    """What each module holds at its own highest moment, the largest first: what others hold, and when, changes nothing of it."""
    changes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for storage in trace.storages:
        change = changes[module_of(trace, storage)]
        change[max(storage.born, 0)] += storage.bytes
        change[last_op(storage, len(trace.ops)) + 1] -= storage.bytes
    for number, op in enumerate(trace.ops):
        if op.workspace:
            changes[op.module].update({number: op.workspace, number + 1: -op.workspace})
    most = {module: max(accumulate(size for _, size in sorted(change.items()))) for module, change in changes.items()}
    return dict(sorted(most.items(), key=lambda item: -item[1]))


def module_of(trace: Trace, storage: Storage) -> str:
    """The module that made it; of what was there before the step, the storage's own name."""
    return storage.name if storage.born < 0 else trace.ops[storage.born].module or storage.name


def _owner(trace: Trace, storage: Storage, saved: bool) -> Owner:
    category, module = category_of(trace, storage, saved), module_of(trace, storage)
    if storage.born < 0:
        return Owner(storage.bytes, category, "", module, "")
    op = trace.ops[storage.born]
    return Owner(storage.bytes, category, op.name, module, op.source)


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
