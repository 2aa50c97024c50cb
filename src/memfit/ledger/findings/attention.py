"""Attention maps that are written out in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.ledger.findings.operators import MATRIX_PRODUCTS, SOFTMAXES, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import counted, layers, place, sizes
from memfit.records import Finding, Op

_LEAST_SIDE = 64
_FURTHEST = 12  # ops between the scores and their softmax: scaling, masks, casts


@dataclass(frozen=True)
class AttentionMap:
    """A softmax over scores of queries and keys, with every tensor of its size around it."""

    op: Op
    shape: tuple[int, ...]
    storages: frozenset[int]  # scores, probabilities, dropout's mask and result


def attention_maps(scene: Scene) -> Iterator[Finding]:
    """One finding for each size of map."""
    by_size: dict[tuple[int, ...], list[AttentionMap]] = {}
    for found in maps_in(scene):
        by_size.setdefault(found.shape[-2:], []).append(found)
    for maps in by_size.values():
        yield from _told(scene, maps)


def _told(scene: Scene, maps: list[AttentionMap]) -> Iterator[Finding]:
    size, when = scene.weighed(frozenset().union(*(found.storages for found in maps)))
    if not size:
        return
    one = "is" if len(maps) == 1 else "are"
    yield Finding(
        "attention_map",
        size,
        place(layers(found.op.module for found in maps), maps[0].op.source),
        f"{counted(len(maps), 'attention map')} of {sizes(maps[0].shape[-2:])} {one} written out in full for every head and sample. "
        f"With what softmax and dropout keep beside them they take {when}; fused attention never makes them.",
        "attention",
    )


def maps_in(scene: Scene) -> Iterator[AttentionMap]:
    """Every softmax of at least 64 by 64 whose scores came from a product of two activations."""
    for _, op in scene.forward_ops():
        if word(op) not in SOFTMAXES or not op.inputs or not op.outputs:
            continue
        shape = scene.trace.storages[op.outputs[0]].shape
        if len(shape) < 2 or min(shape[-2:]) < _LEAST_SIDE:
            continue
        if scores := _back_to_product(scene, op.inputs[0], _FURTHEST):
            yield AttentionMap(op, shape, frozenset(scores) | _made_from(scene, op.outputs[0]))


def _back_to_product(scene: Scene, number: int, steps: int) -> tuple[int, ...]:
    """The storages between a product and its softmax, () when there was no such product."""
    maker = scene.maker(number)
    if maker is None or not steps:
        return ()
    if word(maker) in MATRIX_PRODUCTS:
        weighted = any(scene.is_weight(source) for source in maker.inputs)  # a layer's output: class scores, not attention
        return () if weighted else (number,)
    for source in maker.inputs:
        as_large = source != number and scene.elements(source) == scene.elements(number)
        if as_large and (found := _back_to_product(scene, source, steps - 1)):
            return (number, *found)
    return ()


def _made_from(scene: Scene, probabilities: int) -> frozenset[int]:
    """The probabilities and what is made of them at the same size before they meet the values."""
    found, open_ends = {probabilities}, [probabilities]
    while open_ends:
        for reader in scene.readers.get(open_ends.pop(), ()):
            op = scene.trace.ops[reader]
            if word(op) in MATRIX_PRODUCTS:
                continue
            new = {s for s in op.outputs if scene.elements(s) == scene.elements(probabilities)} - found
            found |= new
            open_ends += new
    return frozenset(found)
