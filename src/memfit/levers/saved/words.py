"""A table in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from memfit.levers.saved.table import BITS, DISK, DROP, HOST
from memfit.records import Trace
from memfit.units import format_bytes

_ELSEWHERE = {DISK: "in a file", HOST: "in the host's memory", BITS: "packed into bits"}


def words_of(trace: Trace, ops: Mapping[int, str]) -> str:
    """What becomes of the results that a table decides about."""
    parts = list(_parts(trace, ops))
    told = f"until backward needs it: {', '.join(parts)}" if parts else ""
    dropped = sum(do == DROP for do in ops.values())
    return "; ".join(filter(None, [told, f"inputs of frozen convolutions ({dropped}), which nobody reads, are dropped" if dropped else ""]))


def _parts(trace: Trace, ops: Mapping[int, str]) -> Iterator[str]:
    if again := [op for op, do in ops.items() if do not in (*_ELSEWHERE, DROP)]:
        sizes: Counter[str] = Counter()
        for op in again:
            sizes[trace.ops[op].name.split(".")[1]] += _made_by(trace, op)
        (name, _), *others = sizes.most_common()
        yield f"{format_bytes(sizes.total())} made again ({'most of it' if others else 'all of it'} by {name})"
    for do, where in _ELSEWHERE.items():
        if size := sum(_made_by(trace, op) for op, word in ops.items() if word == do):
            yield f"{format_bytes(size)} {where}"


def _made_by(trace: Trace, op: int) -> int:
    return sum(trace.storages[s].bytes for s in trace.ops[op].outputs if trace.storages[s].born == op)
