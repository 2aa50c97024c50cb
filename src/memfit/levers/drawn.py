"""The random draws of a step, read from its trace."""

from __future__ import annotations

from typing import Any

from memfit.levers.operators import operator_named
from memfit.ops.draws import Drawn, kind_of_draw, order_of
from memfit.records import Op, Trace


def draw_kind(op: Op) -> str:
    """How an op of a trace draws random numbers; "" when it does not."""
    operator = operator_named(op.name) if op.draws else None
    return "" if operator is None else kind_of_draw(operator)


def draws_of(trace: Trace) -> dict[str, list[list[Any]]]:
    """For each loss that draws, its draws in order: [op, shape, order of the dimensions in memory]."""
    found: dict[str, list[list[Any]]] = {}
    for op in trace.ops:
        if op.phase == "forward" and op.outputs and draw_kind(op):
            drawn = trace.storages[op.outputs[-1]]
            found.setdefault(op.loss, []).append([op.name, list(drawn.shape), list(order_of(drawn.strides))])
    return found


def drawn_from(settings: list[list[Any]]) -> list[Drawn]:
    """What `draws_of` wrote, read back."""
    return [Drawn(op, tuple(shape), tuple(order)) for op, shape, order in settings]


def draws_again_in_backward(trace: Trace) -> bool:
    """A region that is recomputed draws its numbers a second time."""
    return any(op.phase == "backward" and draw_kind(op) for op in trace.ops)


def not_replayable(trace: Trace) -> str:
    """The first draw that a part cannot take from the whole batch's, in words; "" when all can be."""
    for op in trace.ops:
        if op.phase == "forward" and op.outputs and draw_kind(op) == "other":
            where = f" at {op.source}" if op.source else ""
            return f"{op.name.split('.')[1]}{where} draws by the values of its own samples"
    return ""
