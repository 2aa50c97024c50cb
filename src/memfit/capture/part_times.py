"""How much longer the parts of a batch take than the whole: small calls use a machine less well, or its caches better."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memfit.capture.op_times import OpCalls, times_of
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.shrinking import call_for_part
from memfit.records import Trace

_MOST_KINDS = 20  # of calls, those that take most of a step
_PARTS = (2, 4, 8)  # and single samples

Heavy = dict[str, tuple[Call, float, float]]  # a call, its seconds, and those of all such calls in a step


def part_costs(trace: Trace, calls: OpCalls, progress: Callable[[str], None]) -> tuple[tuple[int, float], ...]:
    """For some sizes of micro-batches: the seconds of all of them beside the whole batch's, as the heaviest calls of a step have it.

    Whole and parts are timed one right after the other, in processors' seconds: what else the machine does is not to decide. For the same
    reason no size is believed to cost more than a smaller one, or less than the whole.
    """
    batch, heavy = trace.batch_size, _heaviest(trace, calls)
    sizes = sorted({1, *(-(-batch // parts) for parts in _PARTS)} - {batch})
    trials = {}
    for key, (call, seconds, _) in heavy.items():
        parts = {size: call_for_part(call, batch, size) for size in sizes}
        if sizes and all(parts.values()):
            trials[_word(key, batch, batch)] = call, seconds, call.nbytes
            trials |= {_word(key, batch, s): (part, seconds * s / batch, part.nbytes) for s, part in parts.items() if part is not None}
    found = times_of(trials, progress)
    costs = {size: cost for size in sizes if (cost := _cost(heavy, found, batch, size)) is not None}
    return tuple((size, max(1.0, min(c for smaller, c in costs.items() if smaller <= size))) for size in costs)


def _word(key: str, batch: int, size: int) -> str:
    return f"{size} of {batch}: {key}"


def _heaviest(trace: Trace, calls: OpCalls) -> Heavy:
    found: Heavy = {}
    for number, call in calls.by_op.items():
        op = trace.ops[number]
        if op.seconds is not None and op.phase != "optimizer" and not op.parts:
            _, _, total = found.get(call.key, (call, op.seconds, 0.0))
            found[call.key] = call, op.seconds, total + op.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1][2])[:_MOST_KINDS])


def _cost(heavy: Heavy, found: Mapping[str, list[float]], batch: int, size: int) -> float | None:
    pairs = [(total, found.get(_word(key, batch, batch)), found.get(_word(key, batch, size))) for key, (_, _, total) in heavy.items()]
    timed = [(total, part[1] / whole[1]) for total, whole, part in pairs if whole and part and whole[1]]
    return sum(total * ratio for total, ratio in timed) * batch / size / sum(total for total, _ in timed) if timed else None
