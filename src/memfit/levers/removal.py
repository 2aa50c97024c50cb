"""Taking storages out of a trace: the ops stay, what they made does not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import prod

from memfit.records import Op, Storage, Trace

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def word(op: Op) -> str:
    """An operator's own name, without its namespace and overload: "mul"."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def elements(storage: Storage) -> int:
    """How many numbers a storage holds."""
    return prod(storage.shape)


def gradients_of(trace: Trace, gone: Collection[int], makers: Collection[int]) -> set[int]:
    """Storages made in backward for ops in `makers` that are as large as something gone: its gradients, and what they are summed in."""
    sizes = {elements(trace.storages[s]) for s in gone}
    return {
        number
        for number, storage in enumerate(trace.storages)
        if storage.born >= 0
        and storage.kind != "gradients"
        and elements(storage) in sizes
        and (op := trace.ops[storage.born]).phase == "backward"
        and (op.forward is None or op.forward in makers)
    }


def last_backward(trace: Trace, makers: Collection[int]) -> int:
    """The last op in which gradients of some forward ops are computed."""
    return max((n for n, op in enumerate(trace.ops) if op.forward in makers), default=len(trace.ops) - 1)


def first_backward(trace: Trace, maker: int) -> int:
    """The first op in which a forward op's gradient is computed."""
    return next((n for n, op in enumerate(trace.ops) if op.forward == maker), len(trace.ops) - 1)


def without(trace: Trace, gone: Collection[int], added: Iterable[Storage], inside: Mapping[int, int]) -> Trace:
    """The trace without some storages, with others in their place; `inside` gives ops another workspace.

    Products are still computed, piece by piece: their seconds stay. What only passes over a storage that is gone costs what is left of it.
    """
    touched = {trace.storages[s].born for s in gone}
    storages = [replace(s, bytes=0) if number in gone else s for number, s in enumerate(trace.storages)]
    ops = [
        replace(
            op,
            workspace=inside.get(number, 0),
            workspace_error=inside.get(number, 0),
            seconds=op.seconds if word(op) in _PRODUCTS else None,
        )
        if number in touched or number in inside
        else op
        for number, op in enumerate(trace.ops)
    ]
    return replace(trace, ops=tuple(ops), storages=(*storages, *added))
