"""Bytes over the step's time line: storages are intervals, the peak is the highest sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memfit.records import Storage, Stretch, Trace


def live_bytes(trace: Trace) -> NDArray[np.int64]:
    """For each op, the bytes alive while it runs, its workspace included."""
    count = len(trace.ops)
    change = np.zeros(count + 1, dtype=np.int64)
    for storage in trace.storages:
        change[max(storage.born, 0)] += storage.bytes
        change[min(count, last_op(storage, count) + 1)] -= storage.bytes
    alive: NDArray[np.int64] = np.cumsum(change)[:count] + np.fromiter((op.workspace for op in trace.ops), np.int64, count)
    return alive


def reaching(trace: Trace, peak: int) -> Trace:
    """The trace with this peak: what an allocator counted beyond all that was seen is what the op at the peak took inside."""
    live = live_bytes(trace)
    op = int(live.argmax())
    beyond = max(0, peak - int(live[op]))
    changed = replace(trace.ops[op], workspace=trace.ops[op].workspace + beyond)
    return replace(trace, ops=(*trace.ops[:op], changed, *trace.ops[op + 1 :]))


def last_op(storage: Storage, count: int) -> int:
    """The last op during which a storage is alive."""
    return count - 1 if storage.died is None else storage.died


def alive_at(trace: Trace, op: int) -> Iterator[tuple[int, Storage]]:
    """The storages alive while an op runs, with their numbers."""
    for number, storage in enumerate(trace.storages):
        if storage.born <= op <= last_op(storage, len(trace.ops)):
            yield number, storage


def stretches(trace: Trace) -> tuple[Stretch, ...]:
    """The phases of the step in the order they ran."""
    found: list[Stretch] = []
    for number, op in enumerate(trace.ops):
        if found and (found[-1].phase, found[-1].loss) == (op.phase, op.loss):
            found[-1] = Stretch(op.phase, op.loss, found[-1].first, number)
        else:
            found.append(Stretch(op.phase, op.loss, number, number))
    return tuple(found)
