"""The optimizer's part of a trace: which ops update which parameters, what they take, and how that changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from memfit.ledger.timeline import last_op
from memfit.records import Op, Trace

LOOPS = {
    "Adadelta": ((2, 1), (1, 2)),
    "Adagrad": ((1, 1),),
    "Adam": ((2, 1),),
    "AdamW": ((2, 1),),
    "Adamax": ((1, 0),),
    "NAdam": ((2, 1),),
    "RAdam": ((2, 0),),
    "RMSprop": ((1, 1),),
    "SGD": ((0, 0),),
}
"""What an optimizer's loop over parameters holds at its fullest moments: so many temporaries of this parameter, and of the one before,
which the loop's variables still name."""


@dataclass(frozen=True)
class Update:
    """Ops that share storages: the update of one parameter, or of a list of them handled together."""

    ops: tuple[int, ...]
    gradients: tuple[int, ...]  # storages, in the order of the parameters
    temporaries: tuple[int, ...]  # storages
    taken: int  # the most its temporaries and workspaces hold at once
    optimizer: str  # the class that made its states, "" when it has none


def updates_in(trace: Trace) -> list[Update]:
    """The updates of a step's optimizers."""
    return [update for ops in _connected(trace) if (update := _update(trace, ops)).gradients]


def _connected(trace: Trace) -> list[list[int]]:
    """Optimizer ops in groups that share storages; single numbers, as a count of steps is, connect nothing."""
    group_of: dict[int, list[int]] = {}
    for number, op in enumerate(trace.ops):
        if op.phase != "optimizer":
            continue
        touched = [s for s in (*op.inputs, *op.outputs) if trace.storages[s].shape]
        met = {id(group_of[s]): group_of[s] for s in touched if s in group_of}
        merged = sorted([number, *(n for group in met.values() for n in group)])
        for n in merged:
            for s in (*trace.ops[n].inputs, *trace.ops[n].outputs) if n != number else touched:
                if trace.storages[s].shape:
                    group_of[s] = merged
    return list({id(group): group for group in group_of.values()}.values())


def _update(trace: Trace, ops: list[int]) -> Update:
    touched = dict.fromkeys(s for n in ops for s in (*trace.ops[n].inputs, *trace.ops[n].outputs))
    storages = {s: trace.storages[s] for s in touched}
    temporaries = tuple(s for s, storage in storages.items() if not storage.kind and storage.born in ops)
    count = len(trace.ops)
    taken = max(
        trace.ops[n].workspace + sum(storages[s].bytes for s in temporaries if storages[s].born <= n <= last_op(storages[s], count))
        for n in ops
    )
    kinds = [storage.name.partition("[")[0] for storage in storages.values() if storage.kind == "optimizer"]
    gradients = tuple(s for s, storage in storages.items() if storage.kind == "gradients")
    return Update(tuple(ops), gradients, temporaries, taken, kinds[0] if kinds else "")


def has_lists_of_temporaries(trace: Trace, update: Update) -> bool:
    """Whether it goes op by op through lists of parameters, and holds a list of something while it does."""
    born = [trace.ops[trace.storages[s].born].name for s in update.temporaries if trace.storages[s].shape]
    return any("_foreach_" in name for name in born)


def looped(trace: Trace) -> Trace:
    """Parameter by parameter instead of list by list: temporaries of one parameter at a time."""
    for update in updates_in(trace):
        if has_lists_of_temporaries(trace, update):
            trace = without_temporaries(trace, update, _taken_in_a_loop(trace, update))
    return trace


def _taken_in_a_loop(trace: Trace, update: Update) -> int:
    moments = LOOPS[update.optimizer or "SGD"]  # without momentum it has no states
    decay = any(_changes_gradients(trace.ops[n], update) for n in update.ops)
    sizes = [0, *(trace.storages[g].bytes for g in update.gradients)]
    return max((now + decay) * size + before * previous for previous, size in pairwise(sizes) for now, before in moments)


def _changes_gradients(op: Op, update: Update) -> bool:
    """Weight decay makes a changed copy of the gradients."""
    return op.name.startswith("aten._foreach_add.") and not set(update.gradients).isdisjoint(op.inputs)


def fused(trace: Trace) -> Trace:
    """One kernel does it all: no temporaries."""
    for update in updates_in(trace):
        trace = without_temporaries(trace, update, 0)
    return trace


def without_temporaries(trace: Trace, update: Update, workspace: int) -> Trace:
    """The same ops, but all they take is `workspace`, at the last of them."""
    ops, storages = list(trace.ops), list(trace.storages)
    for n in update.ops:
        ops[n] = replace(ops[n], workspace=workspace if n == update.ops[-1] else 0, workspace_error=0)
    for s in update.temporaries:
        storages[s] = replace(storages[s], bytes=0)
    return replace(trace, ops=tuple(ops), storages=tuple(storages))


def in_backward(trace: Trace) -> Trace:
    """Each parameter's update right after its gradient is complete, and the gradient gone with it."""
    after: dict[int, list[tuple[int, Op]]] = {}  # the updates to come after a backward op, with the gradient each frees
    moved: set[int] = set()
    emptied: set[int] = set()
    touched = _last_touches(trace)
    for update in updates_in(trace):
        moved |= set(update.ops)
        emptied |= set(update.temporaries)
        for gradient, op in _single_updates(trace, update):
            after.setdefault(touched[op.loss, gradient], []).append((gradient, op))
    return _relined(trace, after, moved, emptied)


def _single_updates(trace: Trace, update: Update) -> Iterator[tuple[int, Op]]:
    total = sum(trace.storages[g].bytes for g in update.gradients)
    seconds = [trace.ops[n].seconds for n in update.ops]
    first = trace.ops[update.ops[0]]
    for gradient in update.gradients:
        share = trace.storages[gradient].bytes / total
        took = None if None in seconds else share * sum(s or 0.0 for s in seconds)
        taken = int(share * update.taken)
        yield gradient, replace(first, name="optimizer.step", inputs=(gradient,), outputs=(), workspace=taken, seconds=took)


def _last_touches(trace: Trace) -> dict[tuple[str, int], int]:
    """By loss and storage: the last backward op that reads or writes it. A gradient is complete then."""
    ops = ((n, op) for n, op in enumerate(trace.ops) if op.phase == "backward")
    return {(op.loss, s): n for n, op in ops for s in (*op.inputs, *op.outputs)}


def reads_what_was_updated(trace: Trace) -> bool:
    """Whether backward needs a parameter when its gradient is complete: one that is used detached as well, where nothing waits for it."""
    touched = _last_touches(trace)
    parameters = {storage.name: s for s, storage in enumerate(trace.storages) if storage.kind == "parameters"}
    pairs = (
        (trace.ops[update.ops[0]].loss, gradient, parameters.get(trace.storages[gradient].name, gradient))
        for update in updates_in(trace)
        for gradient in update.gradients
    )
    return any(touched.get((loss, parameter), -1) > touched.get((loss, gradient), -1) for loss, gradient, parameter in pairs)


def _relined(trace: Trace, after: dict[int, list[tuple[int, Op]]], moved: set[int], emptied: set[int]) -> Trace:
    ops: list[Op] = []
    place: list[int] = []  # of each op that was: its number now, or that of the op before it
    freed: dict[int, int] = {}
    for n, op in enumerate(trace.ops):
        if n not in moved:
            ops.append(op if op.forward is None else replace(op, forward=place[op.forward]))
        place.append(len(ops) - 1)
        for gradient, single in after.get(n, ()):
            ops.append(single)
            freed[gradient] = len(ops) - 1
    storages = tuple(
        replace(
            s,
            bytes=0 if number in emptied else s.bytes,
            born=-1 if s.born < 0 else place[s.born],
            died=freed.get(number, None if s.died is None else place[s.died]),
        )
        for number, s in enumerate(trace.storages)
    )
    saved = tuple(replace(s, op=place[s.op], read=None if s.read is None else place[min(s.read, len(place) - 1)]) for s in trace.saved)
    calls = tuple(replace(c, first=place[c.first], last=place[c.last]) for c in trace.calls)
    return replace(trace, ops=tuple(ops), storages=storages, saved=saved, calls=calls)
