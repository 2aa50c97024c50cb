"""Activations that a pass over memory would make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memfit.ledger.findings.operators import CHEAP, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import share
from memfit.records import Finding
from memfit.units import format_bytes

_LEAST_SHARE = 0.1


def cheap_activations(scene: Scene) -> Iterator[Finding]:
    """Results of norms, activation functions and the like that could be dropped all together."""
    cheap = _cheap(scene) & scene.activations.keys()
    size = scene.bytes_at_peak(cheap)
    if not size or size < _LEAST_SHARE * scene.peak:
        return
    makers: Counter[str] = Counter()
    for number in cheap:
        makers[word(scene.trace.ops[scene.trace.storages[number].born])] += scene.trace.storages[number].bytes
    names = " and ".join(name for name, _ in makers.most_common(2))
    yield Finding(
        "cheap_activations",
        size,
        scene.heart(cheap),
        f"{format_bytes(size)} ({share(size, scene.peak)} of the peak) are results of cheap operators, mostly {names}, kept for backward. "
        "Made again when backward needs them, they cost little time and are the same to the bit.",
        "saved",
    )


def _cheap(scene: Scene) -> set[int]:
    """Storages that cheap operators can make again from what is there before the step or kept from dear ones.

    A sum of a convolution's result is not among them when nobody keeps that result: it would take the convolution again.
    """
    at_hand = {number for number, storage in enumerate(scene.trace.storages) if storage.born < 0}
    cheap = set()
    for number, op in scene.forward_ops():
        for made in (s for s in op.outputs if scene.trace.storages[s].born == number):
            if word(op) in CHEAP and at_hand.issuperset(op.inputs):
                at_hand.add(made)
                cheap.add(made)
            elif made in scene.keepers:
                at_hand.add(made)
    return cheap
