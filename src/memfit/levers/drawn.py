"""The random draws of a step, read from its trace."""

from __future__ import annotations

from typing import Any

from memfit.levers.operators import operator_named
from memfit.levers.reading import are_each, at_least, is_bool, is_word
from memfit.levers.sample_rows import SampleRows
from memfit.ops.draws import Drawn, kind_of_draw, order_of
from memfit.records import Op, Trace


def draw_kind(op: Op) -> str:
    """How an op of a trace draws random numbers; "" when it does not."""
    operator = operator_named(op.name) if op.draws else None
    return "" if operator is None else kind_of_draw(operator)


def draws_of(trace: Trace, first: int = 0, last: int | None = None) -> dict[str, list[list[Any]]]:
    """For each loss, its draws in ops `first` to `last`: [op, shape, order of dimensions in memory, whether rows of a sample follow]."""
    found: dict[str, list[list[Any]]] = {}
    rows = SampleRows(trace)
    for now in range(first, len(trace.ops) if last is None else last + 1):
        op = trace.ops[now]
        if op.phase == "forward" and op.outputs and draw_kind(op):
            drawn = trace.storages[op.outputs[-1]]
            found.setdefault(op.loss, []).append([op.name, list(drawn.shape), list(order_of(drawn.strides)), rows.follow(now)])
    return found


def drawn_from(settings: list[list[Any]]) -> list[Drawn]:
    """What `draws_of` wrote, read back; earlier plans do not say whether rows follow."""
    return [Drawn(op, tuple(shape), tuple(order), *follow) for op, shape, order, *follow in settings]


def are_draws(told: Any) -> bool:
    """Whether a plan's file holds what `draws_of` wrote of a loss."""
    return are_each(_is_draw)(told)


def are_draws_of_calls(told: Any) -> bool:
    """The same for each call in a loss."""
    return are_each(are_draws)(told)


def _is_draw(told: Any) -> bool:
    op, shape, order, *follow = told
    whole = are_each(at_least(0))
    in_order = whole(order) and (not order or sorted(order) == list(range(len(shape))))
    return is_word(op) and whole(shape) and in_order and len(follow) <= 1 and all(map(is_bool, follow))


def draws_again_in_backward(trace: Trace) -> bool:
    """A region that is recomputed draws its numbers a second time."""
    return any(op.phase == "backward" and draw_kind(op) for op in trace.ops)


def not_replayable(trace: Trace, first: int = 0, last: int | None = None) -> str:
    """Of ops `first` to `last` the first draw that a part cannot take from the whole batch's, in words; "" when all can be."""
    rows = SampleRows(trace)
    for now in range(first, len(trace.ops) if last is None else last + 1):
        op = trace.ops[now]
        kind = draw_kind(op) if op.phase == "forward" and op.outputs else ""
        if kind and (kind == "other" or rows.alternate(now)):
            where = f" at {op.source}" if op.source else ""
            why = "by the values of its own samples" if kind == "other" else "for rows in which samples may take turns"
            return f"{op.name.split('.')[1]}{where} draws {why}"
    return ""
