"""A trace as it would be with outer products c⊗c used through c. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.levers.removal import elements, first_backward, gradients_of, last_backward, without, word
from memfit.records import Storage, Trace

_PRODUCTS = frozenset({"mm", "bmm", "baddbmm", "addmm"})
_SOFTMAXES = frozenset({"_softmax", "_safe_softmax"})
_FUSED = "_scaled_dot_product"
_LEAST_FACTOR = 8
_ROWS = 256  # as ops.outer_product takes them by default


@dataclass(frozen=True)
class _Region:
    """One attention to the columns of c⊗c and to its own keys."""

    width: int  # E
    end: int  # the op that gives its result
    queries: int  # in all, and of one sample and head
    length: int
    own_keys: int
    keeps_result: bool  # fused attention keeps its result for backward


def without_outer_products(trace: Trace) -> Trace:
    """What is made of c⊗c goes; what `factored_attention` keeps comes."""
    gone, regions = _made_of_outer_products(trace)
    makers = {n for n, op in enumerate(trace.ops) if op.phase == "forward" and gone & {*op.inputs, *op.outputs}}
    added: list[Storage] = []
    inside: dict[int, int] = {}
    for region in regions:
        _kept(trace, region, added, inside)
    return without(trace, gone | gradients_of(trace, gone, makers), added, inside)


def _made_of_outer_products(trace: Trace) -> tuple[set[int], list[_Region]]:
    """The outer products and everything made of them, up to the product of probabilities with values that ends each attention."""
    width_of: dict[int, int] = {}
    chances: set[int] = set()
    regions: list[_Region] = []
    for number, op in enumerate(trace.ops):
        if op.phase != "forward":
            continue
        new = [s for s in op.outputs if trace.storages[s].born == number]
        if _is_outer_product(trace, number):
            width_of.update((s, trace.storages[s].shape[-1]) for s in new)
            continue
        widths = [width_of[s] for s in op.inputs if s in width_of]
        if not widths:
            continue
        if word(op) in _PRODUCTS and chances & set(op.inputs):
            regions.append(_written_out(trace, number, next(s for s in op.inputs if s in chances), widths[0]))
            continue
        if word(op).startswith(_FUSED) and len(op.inputs) >= 3:
            regions.append(_fused(trace, number, widths[0]))
            continue
        width_of.update((s, widths[0]) for s in new)
        if word(op) in _SOFTMAXES or chances & set(op.inputs):
            chances.update(new)
    return set(width_of), regions


def _is_outer_product(trace: Trace, number: int) -> bool:
    """A product of a storage with itself that is many times larger."""
    op = trace.ops[number]
    if word(op) not in (*_PRODUCTS, "mul") or len(set(op.inputs)) != 1 or not op.outputs:
        return False
    made = trace.storages[op.outputs[0]]
    return len(made.shape) >= 2 and elements(made) >= _LEAST_FACTOR * elements(trace.storages[op.inputs[0]])


def _written_out(trace: Trace, number: int, its_map: int, width: int) -> _Region:
    length, columns = trace.storages[its_map].shape[-2:]
    return _Region(width, number, elements(trace.storages[its_map]) // columns, length, columns - width, False)


def _fused(trace: Trace, number: int, width: int) -> _Region:
    """Its second result is one number a query."""
    query, key = (elements(trace.storages[s]) for s in trace.ops[number].inputs[:2])
    sums = trace.storages[trace.ops[number].outputs[1]]
    length = sums.shape[-1]
    return _Region(width, number, elements(sums), length, length * key // query - width, True)


def _kept(trace: Trace, region: _Region, added: list[Storage], inside: dict[int, int]) -> None:
    """Keys, values, the own result and a few numbers a query are kept; the query is kept as it was, scaled or not."""
    result = trace.storages[trace.ops[region.end].outputs[0]]
    unit = result.bytes // max(1, elements(result))
    chunk = region.queries // region.length * min(region.length, _ROWS) * max(0, region.own_keys) * unit
    last = last_backward(trace, {region.end})
    results = 2 if region.keeps_result else 3
    added.append(Storage(results * result.bytes + 6 * region.queries * unit, region.end, last, "", result.shape, result.dtype))
    exponentials = _ROWS * region.width * unit
    inside[region.end] = max(2 * chunk + 2 * result.bytes, exponentials)
    inside[first_backward(trace, region.end)] = max(2 * chunk + 4 * result.bytes, exponentials)
