"""A trace as it would be without attention maps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.ledger.findings.attention import AttentionMap
from memfit.levers.removal import elements, first_backward, gradients_of, last_backward, without, word
from memfit.records import Storage, Trace

_PRODUCTS = frozenset({"mm", "bmm", "baddbmm"})
_ROWS_WITH_DROPOUT = 128


def without_maps(trace: Trace, maps: Sequence[AttentionMap], rows: int) -> Trace:
    """Scores, probabilities and what dropout makes of them go; results stay until backward, with one number a query."""
    gone = {s for found in maps for s in found.storages} | {s for found in maps for s in _masks(trace, found)}
    makers = {n for n, op in enumerate(trace.ops) if op.phase == "forward" and gone & {*op.inputs, *op.outputs}}
    added: list[Storage] = []
    inside: dict[int, int] = {}
    for found in maps:
        trace = _with_kept_result(trace, found, rows, added, inside)
    return without(trace, gone | gradients_of(trace, gone, makers), added, inside)


def _masks(trace: Trace, found: AttentionMap) -> set[int]:
    """What dropout draws, and masks spread to the map's size: read beside the map, as large as it."""
    size = elements(trace.storages[next(iter(found.storages))])
    readers = (op for op in trace.ops if op.phase == "forward" and found.storages & {*op.inputs, *op.outputs})
    return {s for op in readers for s in op.inputs if trace.storages[s].born >= 0 and elements(trace.storages[s]) == size}


def _with_kept_result(trace: Trace, found: AttentionMap, rows: int, added: list[Storage], inside: dict[int, int]) -> Trace:
    end = next(
        (n for n, op in enumerate(trace.ops) if op.phase == "forward" and word(op) in _PRODUCTS and _reads_chances(trace, found, n)), None
    )
    if end is None:
        return trace
    result = trace.storages[trace.ops[end].outputs[0]]
    queries = elements(result) and elements(Storage(0, 0, 0, shape=found.shape)) // found.shape[-1]
    unit = result.bytes // max(1, elements(result))
    last = last_backward(trace, {end})
    added.append(Storage(4 * queries, end, last, "", (queries,), "float32"))
    dropped = any(word(trace.ops[trace.storages[s].born]) in ("bernoulli", "empty_like", "native_dropout") for s in _masks(trace, found))
    if rows or dropped:
        length, columns = found.shape[-2:]
        chunk = queries // length * min(length, rows or _ROWS_WITH_DROPOUT) * columns * unit
        inside[end] = chunk
        inside[first_backward(trace, end)] = 2 * chunk
        if dropped:
            added.append(Storage(queries * -(-columns // 8), end, last, "", (queries, -(-columns // 8)), "uint8"))
    storages = list(trace.storages)
    number = trace.ops[end].outputs[0]
    if result.died is not None:
        storages[number] = replace(result, died=max(result.died, last))
    return replace(trace, storages=tuple(storages))


def _reads_chances(trace: Trace, found: AttentionMap, number: int) -> bool:
    """Whether a product takes the probabilities to the values: it reads what the softmax made, and makes no part of the map."""
    op = trace.ops[number]
    return bool(found.storages & set(op.inputs)) and not found.storages & set(op.outputs)
