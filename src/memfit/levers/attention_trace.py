"""A trace as it would be without attention maps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from memfit.ledger.findings.attention import AttentionMap
from memfit.levers.removal import elements, first_backward, gradients_of, last_backward, without, word
from memfit.ops.attention import fused_workspaces, rows_for
from memfit.ops.attention_parts import largest_part
from memfit.records import Op, Storage, Trace

_PRODUCTS = frozenset({"mm", "bmm", "baddbmm"})
_COPIES = frozenset({"clone", "mul", "_to_copy"})
_DRAWS = frozenset({"bernoulli", "empty_like", "native_dropout"})


def without_maps(trace: Trace, maps: Sequence[AttentionMap], rows: int) -> Trace:
    """Scores, probabilities and what dropout makes of them go; what they are made from and the results stay until backward."""
    gone: set[int] = set()
    added: list[Storage] = []
    inside: dict[int, int] = {}
    lives = [s.died for s in trace.storages]
    for found in maps:
        gone |= _kept_instead(trace, found, rows, added, inside, lives)
    trace = replace(trace, storages=tuple(replace(s, died=died) for s, died in zip(trace.storages, lives, strict=True)))
    makers = {n for n, op in enumerate(trace.ops) if op.phase == "forward" and gone & {*op.inputs, *op.outputs}}
    maps_alone = {s for s in gone if any(elements(trace.storages[s]) == prod(found.shape) for found in maps)}
    return without(trace, gone | gradients_of(trace, maps_alone, makers), added, inside)


def _masks(trace: Trace, found: AttentionMap) -> set[int]:
    """What dropout draws, and masks spread to the map's size: read beside the map, as large as it."""
    size = elements(trace.storages[next(iter(found.storages))])
    readers = (op for op in trace.ops if op.phase == "forward" and found.storages & {*op.inputs, *op.outputs})
    return {s for op in readers for s in op.inputs if trace.storages[s].born >= 0 and elements(trace.storages[s]) == size}


def _kept_instead(
    trace: Trace, found: AttentionMap, rows: int, added: list[Storage], inside: dict[int, int], lives: list[int | None]
) -> set[int]:
    """Notes what one attention keeps without its map, and answers what goes."""
    gone = set(found.storages) | _masks(trace, found)
    forward = [(n, op) for n, op in enumerate(trace.ops) if op.phase == "forward"]
    products = [n for n, op in forward if word(op) in _PRODUCTS and found.storages & {*op.inputs, *op.outputs}]
    if not products:
        return gone
    gone |= _other_uses(trace, gone, products)
    last = last_backward(trace, products)
    for number in {s for n in products for s in trace.ops[n].inputs} - gone:
        source, copies = _source(trace, number, set(products))
        gone |= copies
        if (died := lives[source]) is not None:
            lives[source] = max(died, last)
    end = products[-1]
    result = _joined(trace, trace.ops[end].outputs[0])
    if (died := lives[result]) is not None:
        lives[result] = max(died, last)
    _note_workspaces(trace, found, rows, end, last, added, inside)
    return gone


def _other_uses(trace: Trace, gone: set[int], products: Sequence[int]) -> set[int]:
    """What is made of the map beside the attention itself: weights averaged over heads, say."""
    span = range(products[0], products[-1] + 12)
    readers = [n for n in span if n not in products and trace.ops[n].phase == "forward" and gone & set(trace.ops[n].inputs)]
    return {s for n in readers for s in trace.ops[n].outputs if trace.storages[s].born == n}


def _source(trace: Trace, number: int, readers: set[int]) -> tuple[int, set[int]]:
    """What a query, key or value was copied or scaled from, and the copies, if nothing but the map needed them."""
    copies: set[int] = set()
    while (maker := _copier(trace, number, readers)) is not None:
        copies.add(number)
        readers = {*readers, trace.storages[number].born}
        size, number = elements(trace.storages[number]), maker.inputs[0]
        if elements(trace.storages[number]) != size:  # a layer's output that holds queries, keys and values together
            break
    return number, copies


def _copier(trace: Trace, number: int, readers: set[int]) -> Op | None:
    born = trace.storages[number].born
    if born < 0 or word(trace.ops[born]) not in _COPIES or len(set(trace.ops[born].inputs)) != 1:
        return None
    found = {n for n, op in enumerate(trace.ops) if op.phase == "forward" and number in op.inputs and number not in op.outputs}
    return trace.ops[born] if found <= readers else None


def _note_workspaces(
    trace: Trace, found: AttentionMap, rows: int, end: int, last: int, added: list[Storage], inside: dict[int, int]
) -> None:
    result = trace.storages[trace.ops[end].outputs[0]]
    length, columns = found.shape[-2:]
    queries = prod(found.shape) // columns
    back = first_backward(trace, end)
    dropped = any(word(trace.ops[trace.storages[s].born]) in _DRAWS for s in _masks(trace, found))
    if not rows and not dropped:
        added.append(Storage(4 * queries, end, last, "", (queries,), "float32"))
        inside[end], within = fused_workspaces(length, columns, elements(result) // queries)
        inside[back] = within + 3 * result.bytes
        if any(word(trace.ops[trace.storages[s].born]) == "masked_fill" for s in found.storages):
            added.append(Storage(4 * length * columns, end, last, "", (length, columns), "float32"))  # a mask of booleans becomes numbers
        return
    part = largest_part(found.shape, rows or rows_for(length)) * columns * (result.bytes // max(1, elements(result)))
    inside[end] = 2 * part + part // 4  # scores beside the mask as numbers and its bits, or beside probabilities
    inside[back] = 2 * part + 4 * result.bytes
    if dropped:
        bits = -(-columns // 8)
        added.append(Storage(queries * bits, end, last, "", (queries, bits), "uint8"))
        inside[end] = max(inside[end], queries * (columns + 2 * bits))
        inside[back] += part


def _joined(trace: Trace, result: int) -> int:
    """Heads are joined by a copy, which the layout of the new result makes needless: that copy stands for both."""
    copies = (op for op in trace.ops if op.phase == "forward" and word(op) == "clone" and result in op.inputs)
    return next((op.outputs[0] for op in copies), result)
