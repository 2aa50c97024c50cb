"""How long operators take: as measured on the trace, or estimated from work and bytes where nothing was measured."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from memfit.records import Op, Trace

FLOPS = 5e10  # a second, of a plain processor: only ratios between operators matter while nothing is measured
BYTES = 5e9
_MULTIPLIES = ("mm.", "bmm.", "addmm.", "baddbmm.", "linear.")


def seconds_of(trace: Trace) -> tuple[NDArray[np.float64], bool]:
    """Seconds of every op, and whether they were measured."""
    if all(op.seconds is not None for op in trace.ops) and not trace.predicted:
        return np.array([op.seconds for op in trace.ops], dtype=np.float64), True
    return np.array([_estimate(trace, op) for op in trace.ops], dtype=np.float64), False


def _estimate(trace: Trace, op: Op) -> float:
    touched = sum(trace.storages[s].bytes for s in {*op.inputs, *op.outputs})
    return _flops(trace, op) / FLOPS + touched / BYTES + 5e-6


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
