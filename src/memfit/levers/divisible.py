"""Whether a forward pass in parts is the same training: not where it changes a model's state, or takes statistics of the whole batch."""

from __future__ import annotations

from memfit.ledger.batch_statistics import takes_batch_statistics
from memfit.levers.operators import writes
from memfit.records import Op, Trace


def is_divisible(trace: Trace, first: int = 0, last: int | None = None) -> bool:
    """Whether ops `first` to `last` of the forward passes may run once for each part of the batch."""
    numbers = range(first, len(trace.ops) if last is None else last + 1)
    return not any(_changes_the_model(trace, now) or takes_batch_statistics(trace, trace.ops[now]) for now in numbers)


def _changes_the_model(trace: Trace, now: int) -> bool:
    """In parts a running average, of statistics or of weights, would be updated several times. A buffer made here took another's place."""
    op = trace.ops[now]
    if op.phase != "forward":
        return False
    changed = {n for n in op.outputs if trace.storages[n].born == now} | (_written(op) if writes(op.name) else set())
    return any(trace.storages[number].kind in ("other", "parameters") for number in changed)


def _written(op: Op) -> set[int]:
    """Operators on lists of tensors write and return nothing: of those, all that they were given."""
    return set(op.outputs or op.inputs)
