"""Outer products and broadcasts: a result many times larger than everything it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from memfit.ledger.findings.attention import maps_in
from memfit.ledger.findings.operators import BROADCASTS, COPIES, MATRIX_PRODUCTS, PAIRWISE_DISTANCES, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import counted, layers, place, sizes, starred
from memfit.records import Finding, Op
from memfit.units import format_bytes

_LEAST_FACTOR = 8


@dataclass(frozen=True)
class _Chain:
    """Ops that together make one large result: copies of the factors, then their product."""

    ops: tuple[int, ...]
    made: tuple[int, ...]  # storages, the result last
    factor: int


def outer_products(scene: Scene) -> Iterator[Finding]:
    """One finding for each line that multiplies memory."""
    lines: dict[tuple[str, str], list[_Chain]] = {}
    for chain in _chains(scene):
        op = scene.trace.ops[chain.ops[-1]]
        lines.setdefault((starred(op.module), op.source), []).append(chain)
    for chains in lines.values():
        yield from _told(scene, chains)


def _told(scene: Scene, chains: list[_Chain]) -> Iterator[Finding]:
    made = [number for chain in chains for number in chain.made]
    alive, most = scene.bytes_at_peak(made), scene.most_bytes(made)
    if not scene.is_worth_telling(alive or most):
        return
    largest = max(chains, key=lambda chain: scene.elements(chain.made[-1]))
    last = scene.trace.ops[largest.ops[-1]]
    shape = scene.trace.storages[largest.made[-1]].shape
    often = f", {counted(len(chains), 'time')} over," if len(chains) > 1 else ""
    when = f"{format_bytes(alive)} at the peak" if alive else f"{format_bytes(most)} at its largest moment, gone by the peak"
    yield Finding(
        "outer_product",
        alive or most,
        place(layers(scene.trace.ops[chain.ops[-1]].module for chain in chains), last.source),
        f"{word(last)} makes a tensor of {sizes(shape)}{often} that is ×{largest.factor} the size of what it is made from: {when}. "
        "Used through its factors, it need never exist as a whole.",
        "outer_product",
    )


def _chains(scene: Scene) -> list[_Chain]:
    """Every growing result with the copies that went into it, told once: at its last op."""
    chains: dict[int, tuple[int, ...]] = {}  # by the last op
    chain_of: dict[int, int] = {}  # the last op of the chain that made a storage
    maps = {number for found in maps_in(scene) for number in found.storages}
    for number, op in scene.forward_ops():
        made = _new_storage(scene, number, op)
        if made is None or made in maps:
            continue
        before = {chain_of[s] for s in op.inputs if s in chain_of}
        if _grows(scene, op, made) or any(_completes(scene, op, made, last) for last in before):
            chains[number] = (*(n for last in sorted(before) for n in chains.pop(last, ())), number)
            chain_of[made] = number
    return [_chain(scene, ops) for ops in chains.values()]


def _chain(scene: Scene, ops: tuple[int, ...]) -> _Chain:
    made = [made for n in ops if (made := _new_storage(scene, n, scene.trace.ops[n])) is not None]
    given = {s for n in ops for s in scene.trace.ops[n].inputs} - set(made)
    return _Chain(ops, tuple(made), scene.elements(made[-1]) // max(1, sum(map(scene.elements, given))))


def _new_storage(scene: Scene, number: int, op: Op) -> int | None:
    return next((s for s in op.outputs if scene.trace.storages[s].born == number), None)


def _grows(scene: Scene, op: Op, made: int) -> bool:
    """Whether an op is of a kind that can multiply memory, and does; channels widened by weights are a layer's own business."""
    kind = word(op)
    if not (kind in BROADCASTS | COPIES | PAIRWISE_DISTANCES or (kind in MATRIX_PRODUCTS and _inner_size_is_one(scene, op, made))):
        return False
    given = sum(scene.elements(number) for number in set(op.inputs))
    large = scene.is_worth_telling(scene.trace.storages[made].bytes)
    return large and 0 < _LEAST_FACTOR * given <= scene.elements(made)


def _inner_size_is_one(scene: Scene, op: Op, made: int) -> bool:
    """[b, m, k] times [b, k, n] has b·m·n results from b·m·k and b·k·n numbers, which gives k."""
    factors = op.inputs[-2:]
    if len(factors) < 2 or any(map(scene.is_weight, factors)):
        return False
    shape = scene.trace.storages[made].shape
    batches = prod(shape[:-2])
    return prod(map(scene.elements, factors)) == batches * scene.elements(made)


def _completes(scene: Scene, op: Op, made: int, last: int) -> bool:
    """Whether an op multiplies (adds, …) what a chain has only copied so far."""
    copied = scene.trace.ops[last]
    return word(copied) in COPIES and word(op) in BROADCASTS and scene.elements(made) == scene.elements(copied.outputs[0])
