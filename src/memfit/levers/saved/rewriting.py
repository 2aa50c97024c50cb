"""The step's time line as it will be with a table on: a new Trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from memfit.levers.saved.line import Line
from memfit.levers.saved.schedule import Schedule
from memfit.records import Call, Op, Storage, Trace


def with_remakings(line: Line, new: Schedule) -> Trace:
    """The trace with remakings put in before the ops that ask for them, and every storage living as long as it then does."""
    trace = line.trace
    counts = [len(new.again.get(number, ())) for number in range(len(trace.ops))]
    moved = [number + count for number, count in enumerate(accumulate(counts))]

    ops: list[Op] = []
    for number, op in enumerate(trace.ops):
        ops.extend(replace(trace.ops[node], phase="backward", loss=op.loss, forward=node) for node in new.again.get(number, ()))
        ops.append(replace(op, forward=None if op.forward is None else moved[op.forward]))
    storages = [
        replace(
            storage,
            born=storage.born if storage.born < 0 else moved[storage.born],
            died=new.position(new.died[n], moved) if n in new.died else None if storage.died is None else moved[storage.died],
        )
        for n, storage in enumerate(trace.storages)
    ]
    storages += [
        Storage(
            piece.bytes,
            new.position(piece.born, moved),
            new.position(piece.died, moved),
            shape=trace.storages[piece.source].shape,
            dtype=trace.storages[piece.source].dtype,
        )
        for piece in new.pieces
    ]
    return replace(
        trace,
        ops=tuple(ops),
        storages=tuple(storages),
        saved=tuple(replace(s, op=moved[s.op], read=None if s.read is None else moved[s.read]) for s in trace.saved),
        calls=tuple(Call(c.module, moved[c.first], moved[c.last]) for c in trace.calls),
        step_seconds=None if trace.step_seconds is None else trace.step_seconds + _seconds(line, new),
    )


def _seconds(line: Line, new: Schedule) -> float:
    return sum(line.trace.ops[node].seconds or 0.0 for nodes in new.again.values() for node in nodes)
