"""How long operators take: as measured on the trace, or estimated from work and bytes where nothing was measured."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from memfit.records import Op, Speeds, Trace

_OVERHEAD = 5e-6  # of any call
_EMPTY = ("empty", "new_empty")
_MULTIPLIES = ("mm.", "bmm.", "addmm.", "baddbmm.", "linear.")


def seconds_of(trace: Trace, speeds: Speeds) -> NDArray[np.float64]:
    """Seconds of every op: as it was timed, or estimated from its work and its bytes, in the measure of those of its kind that were."""
    estimates = np.array([_estimate(trace, op, speeds) for op in trace.ops], dtype=np.float64)
    known = np.array([np.nan if op.seconds is None else op.seconds for op in trace.ops], dtype=np.float64)
    timed = ~np.isnan(known)
    ratios = _ratios(trace, estimates, known, timed)
    return np.where(timed, known, estimates * [ratios.get(op.name, 1.0) for op in trace.ops])


def slower_in_parts(trace: Trace, size: int) -> float:
    """How many times as long a batch takes in micro-batches of a size: measured for some sizes, and between them on a straight line."""
    sizes, costs = zip(*trace.part_costs, (trace.batch_size, 1.0), strict=True)
    return float(np.interp(np.log(size), np.log(sizes), costs))


def timed_share(trace: Trace, speeds: Speeds) -> float:
    """How much of a step's seconds was timed and not estimated."""
    seconds = seconds_of(trace, speeds)
    return float(seconds[[op.seconds is not None for op in trace.ops]].sum() / seconds.sum())


def _ratios(trace: Trace, estimates: NDArray[np.float64], known: NDArray[np.float64], timed: NDArray[np.bool_]) -> dict[str, float]:
    """Of timed to estimated seconds, by operator."""
    sums: dict[str, tuple[float, float]] = {}
    for number in np.flatnonzero(timed):
        before = sums.get(trace.ops[number].name, (0.0, 0.0))
        sums[trace.ops[number].name] = before[0] + float(known[number]), before[1] + float(estimates[number])
    return {name: took / estimated for name, (took, estimated) in sums.items()}


def _estimate(trace: Trace, op: Op, speeds: Speeds) -> float:
    if _only_looks(op):
        return _OVERHEAD
    touched = sum(trace.storages[s].bytes for s in {*op.inputs, *op.outputs})
    return (_flops(trace, op) / speeds.flops + touched / speeds.bytes + _OVERHEAD) * max(1, op.parts)


def _only_looks(op: Op) -> bool:
    """A view of what is there, or memory that nobody has written to yet."""
    word = op.name.removeprefix("aten.").split(".")[0]
    return word.startswith(_EMPTY) or (set(op.outputs) <= set(op.inputs) and not word.endswith("_") and not op.name.endswith("out"))


def _flops(trace: Trace, op: Op) -> float:
    word = op.name.removeprefix("aten.")
    sizes = [max(1, trace.storages[s].bytes // 4) for s in op.inputs]
    out = max((trace.storages[s].bytes // 4 for s in op.outputs), default=1)
    if word.startswith("convolution.") and len(op.inputs) > 1:
        weight = trace.storages[op.inputs[1]]
        return 2.0 * out * sizes[1] / max(1, weight.shape[0] if weight.shape else 1)
    if word.startswith("convolution_backward"):
        return 4.0 * sizes[0] * sizes[-1] / max(1, trace.storages[op.inputs[-1]].shape[0] if trace.storages[op.inputs[-1]].shape else 1)
    if word.startswith(_MULTIPLIES) and len(sizes) >= 2:
        heads = trace.storages[op.inputs[-2]].shape[0] if "bmm" in word and trace.storages[op.inputs[-2]].shape else 1
        return 2.0 * sqrt(sizes[-1] * sizes[-2] * out / max(1, heads))
    if "scaled_dot_product" in word and trace.storages[op.inputs[0]].shape:
        return 4.0 * sizes[0] * trace.storages[op.inputs[0]].shape[-2]
    return 0.0
