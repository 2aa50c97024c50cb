"""A trace as it would be with outer products c⊗c used through c. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.levers.removal import elements, first_backward, gradients_of, last_backward, without, word
from memfit.records import Storage, Trace

_PRODUCTS = frozenset({"mm", "bmm", "baddbmm", "addmm"})
_SOFTMAXES = frozenset({"_softmax", "_safe_softmax"})
_LEAST_FACTOR = 8
_ROWS = 256  # as ops.outer_product takes them by default


@dataclass
class _Region:
    """One attention to the columns of c⊗c."""

    width: int  # E
    ops: set[int] = field(default_factory=set)
    map: Storage | None = None
    end: int = -1


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
            its_map = next(s for s in op.inputs if s in chances)
            regions.append(_Region(widths[0], set(), trace.storages[its_map], number))
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


def _kept(trace: Trace, region: _Region, added: list[Storage], inside: dict[int, int]) -> None:
    """Queries, keys and values are kept as they come from one layer; the result, its difference, and a few numbers a query."""
    assert region.map is not None
    result = trace.storages[trace.ops[region.end].outputs[0]]
    length, columns = region.map.shape[-2:]
    queries = elements(region.map) // columns
    unit = result.bytes // max(1, elements(result))
    chunk = queries // length * min(length, _ROWS) * max(0, columns - region.width) * unit
    last = last_backward(trace, {region.end})
    added.append(Storage(5 * result.bytes + 7 * queries * unit, region.end, last, "", result.shape, result.dtype))
    exponentials = _ROWS * region.width * unit
    inside[region.end] = max(chunk + 2 * result.bytes, exponentials)
    inside[first_backward(trace, region.end)] = max(2 * chunk + 3 * result.bytes, exponentials)
