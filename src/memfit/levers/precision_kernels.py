"""What an op takes, inside and in time, when it runs in half precision. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from memfit.levers.precision_ops import LOWERED, PRODUCTS, word
from memfit.records import Op, Trace

_SLOWER = {("cpu", "float16"): 17.0}  # measured; bfloat16 takes about as long as float32 there


def in_half(trace: Trace, op: Op, dtype: str) -> Op:
    """The op in half precision: with the workspace that was measured, or else a guess that admits to be one."""
    measured = getattr(op, f"{dtype}_workspace")
    inside = measured if measured is not None else _workspace(trace, op) if trace.device == "cpu" else op.workspace // 2
    slower = _SLOWER.get((trace.device, dtype), 1.0) if word(op).startswith(tuple(LOWERED)) else 1.0
    seconds = None if op.seconds is None else op.seconds * slower
    unsure = 0 if measured is not None else max(inside, op.workspace) if word(op).startswith("convolution") else inside
    return replace(op, workspace=inside, workspace_error=op.workspace_error + unsure, seconds=seconds)


def _workspace(trace: Trace, op: Op) -> int:
    """What a CPU takes inside: products sum in float32; convolutions copy their tensors, and never make columns as float32 ones may."""
    if word(op) in PRODUCTS:
        return 4 * sum(prod(trace.storages[s].shape) for s in op.outputs) + 128
    tensors = sum(trace.storages[s].bytes // 2 for s in {*op.inputs[:2], *op.outputs[:1]})
    if word(op) == "convolution":
        return min(op.workspace // 2, tensors)
    if word(op) == "convolution_backward":
        return min(op.workspace * 3 // 4, 3 * tensors // 2)
    return op.workspace // 2
