"""How long operators take: as measured on the trace, or estimated from work and bytes where nothing was measured."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from memfit.records import Op, Speeds, Trace

_OVERHEAD = 5e-6  # of any call
_MULTIPLIES = ("mm.", "bmm.", "addmm.", "baddbmm.", "linear.")


def seconds_of(trace: Trace, speeds: Speeds) -> NDArray[np.float64]:
    """Seconds of every op: as it was timed in a real run, or estimated from its work and its bytes."""
    if all(op.seconds is not None for op in trace.ops) and not trace.predicted:
        return np.array([op.seconds for op in trace.ops], dtype=np.float64)
    return np.array([_estimate(trace, op, speeds) for op in trace.ops], dtype=np.float64)


def _estimate(trace: Trace, op: Op, speeds: Speeds) -> float:
    touched = sum(trace.storages[s].bytes for s in {*op.inputs, *op.outputs})
    return _flops(trace, op) / speeds.flops + touched / speeds.bytes + _OVERHEAD


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
