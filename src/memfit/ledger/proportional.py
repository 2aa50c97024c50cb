"""Which storages of a step grow with its batch. Worked out from the trace: what was made from the batch, and of what size."""

from __future__ import annotations

import math

from memfit.records import Op, Trace

_INPUT_FIRST = ("convolution_backward", "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward")
"""Ops that give an input's gradient first and their weights' gradients after it."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def proportional_storages(trace: Trace) -> frozenset[int]:
    """The numbers of the storages whose bytes are in proportion to the number of samples; of the batch itself what has a row for each."""
    found = {n for n, s in enumerate(trace.storages) if s.kind == "batch" and s.shape[:1] == (trace.batch_size,)}
    for now, op in enumerate(trace.ops):
        if op.phase == "optimizer":
            continue
        for position, number in enumerate(op.outputs):
            if trace.storages[number].born == now and _grows(trace, op, position, number, found):
                found.add(number)
    return frozenset(found)


def _grows(trace: Trace, op: Op, position: int, number: int, found: set[int]) -> bool:
    made = trace.storages[number]
    count = math.prod(made.shape)
    if made.kind or not any(length and length % trace.batch_size == 0 for length in made.shape):
        return False
    if op.phase == "forward":
        return bool(found.intersection(op.inputs)) or (not op.inputs and made.shape[0] == trace.batch_size)
    name = op.name.split(".")[1]
    forward = trace.ops[op.forward] if op.forward is not None else None
    around = {*op.inputs, *((*forward.inputs, *forward.outputs) if forward else ())}
    growing = {math.prod(trace.storages[n].shape) for n in around & found}
    fixed = {math.prod(trace.storages[n].shape) for n in around - found}
    if name in _INPUT_FIRST:
        return position == 0 and count in growing
    if name in _PRODUCTS and found.issuperset(op.inputs) and count in fixed:
        return False  # the gradient of a weight: summed over all samples
    if count in growing:
        return True
    return count not in fixed and bool(growing)
