"""What the one op that runs at the peak needs while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.ledger.findings.attention import maps_in
from memfit.ledger.findings.operators import LOG_SOFTMAXES, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import place, share
from memfit.records import Finding, Op
from memfit.units import format_bytes

_LEAST_SHARE = 0.1


def temporary_peak(scene: Scene) -> Iterator[Finding]:
    """The op's workspace and the passing tensors it reads and writes: no choice of what autograd keeps lowers them."""
    op = scene.trace.ops[scene.peak_op]
    passing = {number for number in (*op.inputs, *op.outputs) if number in scene.alive and scene.category(number) == "temporaries"}
    tensors = scene.bytes_at_peak(passing)
    size = op.workspace + tensors
    if size < max(1, _LEAST_SHARE * scene.peak):
        return
    inside = f"{format_bytes(op.workspace)} of workspace" if op.workspace else ""
    beside = f"{format_bytes(tensors)} of passing tensors that it reads and writes" if tensors else ""
    parts = " and ".join(filter(None, (inside, beside)))
    yield Finding(
        "temporary_peak",
        size,
        place(op.module, op.source),
        f"At the peak {word(op)} runs ({op.phase}) with {parts}: {share(size, scene.peak)} of the peak, "
        "which keeping fewer activations cannot lower.",
        _lever_for(scene, op),
    )


def _lever_for(scene: Scene, op: Op) -> str:
    if op.phase == "optimizer":
        return "optimizer"
    if any(number in found.storages for found in maps_in(scene) for number in op.inputs):
        return "attention"
    if scene.trace.batch_size > 1 and not scene.looks_at_the_batch_as_one:
        return "microbatch"
    if word(op) in LOG_SOFTMAXES:
        return "chunk"  # a loss over tokens or pixels can be taken piece by piece, also for a single sample
    return "precision" if scene.trace.half_is_cheap else "architecture"
