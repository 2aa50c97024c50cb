"""Outer products and broadcasts: a result many times larger than everything it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from memfit.ledger.findings.attention import maps_in
from memfit.ledger.findings.operators import BROADCASTS, COPIES, MATRIX_PRODUCTS, PAIRWISE_DISTANCES, PRODUCTS, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import TIMES, counted, layers, place, sizes, starred
from memfit.records import Finding, Op

_LEAST_FACTOR = 8
_ADVICE = {
    "outer_product": "Used through its factors, it need never exist as a whole.",
    "chunk": "Made and used piece by piece, or left as a view by expand() where a copy is not needed, it need never exist as a whole.",
}


@dataclass(frozen=True)
class _Chain:
    """Ops that together make one large result: copies of the factors, then their product."""

    ops: tuple[int, ...]
    made: tuple[int, ...]  # storages, the result last
    factor: int


def outer_products(scene: Scene) -> Iterator[Finding]:
    """One finding for each line that multiplies memory."""
    lines: dict[str, list[_Chain]] = {}
    for chain in _chains(scene):
        op = scene.trace.ops[chain.ops[-1]]
        lines.setdefault(op.source or starred(op.module), []).append(chain)
    for chains in lines.values():
        yield from _told(scene, chains)


def _told(scene: Scene, chains: list[_Chain]) -> Iterator[Finding]:
    made = [number for chain in chains for number in chain.made]
    size, when = scene.weighed(made)
    if not size:
        return
    largest = max(chains, key=lambda chain: scene.elements(chain.made[-1]))
    last = scene.trace.ops[largest.ops[-1]]
    shape = scene.trace.storages[largest.made[-1]].shape
    lever = _lever_for(last)
    modules = layers(scene.trace.ops[chain.ops[-1]].module for chain in chains)
    often = f", {counted(len(chains), 'time')} over," if len(chains) > 1 else ""
    yield Finding(
        "outer_product",
        size,
        place(modules, last.source),
        f"{word(last)} makes a tensor of {sizes(shape)}{often} that is {TIMES}{largest.factor} the size of what it is made from: {when}"
        f"{_read_in(scene, chains, modules)}. {_ADVICE[lever]}",
        lever,
    )


def _read_in(scene: Scene, chains: list[_Chain], made_in: str) -> str:
    readers = (scene.trace.ops[reader] for chain in chains for reader in scene.readers.get(chain.made[-1], ()))
    modules = layers(op.module for op in readers if op.module)
    return f", read in {modules}" if modules not in ("", made_in) else ""


def _lever_for(op: Op) -> str:
    """A product can be used through its factors; a copy or a table of differences can only be made piece by piece."""
    return "outer_product" if word(op) in PRODUCTS else "chunk"


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
