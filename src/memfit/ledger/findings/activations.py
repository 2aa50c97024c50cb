"""What autograd keeps for backward: in frozen parts, and once for every sample of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.ledger.findings.operators import CONVOLUTIONS, word
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import counted, is_under, layers, share
from memfit.records import Finding, Model
from memfit.units import format_bytes

_LEAST_SHARE_OF_FROZEN = 0.01
_LEAST_SHARE_OF_BATCH = 0.25


def frozen_activations(scene: Scene) -> Iterator[Finding]:
    """Activations that only parts without trained parameters keep, one finding for each model."""
    for model in scene.trace.models:
        kept = [number for number in scene.activations if _is_frozen(scene, number, model)]
        size = scene.bytes_at_peak(kept)
        if size < max(1, _LEAST_SHARE_OF_FROZEN * scene.peak):
            continue
        keepers = {scene.trace.ops[keeper].module for number in kept for keeper in scene.keepers[number]}
        paths = [path for path in model.frozen if any(is_under(module, path) for module in keepers)]
        yield Finding("frozen_activations", size, layers(paths) or model.kind, _why_frozen(scene, kept, size, paths), "saved")


def _is_frozen(scene: Scene, number: int, model: Model) -> bool:
    keepers = [scene.trace.ops[keeper].module for keeper in scene.keepers[number]]
    return all(any(is_under(module, path) for path in model.frozen) for module in keepers)


def _why_frozen(scene: Scene, kept: list[int], size: int, paths: list[str]) -> str:
    for_weights = [n for n in kept if all(word(scene.trace.ops[k]) in CONVOLUTIONS for k in scene.keepers[n])]
    why = f"No parameter is trained here, yet {format_bytes(size)} of activations ({share(size, scene.peak)} of the peak) are kept"
    why += " because gradients pass through to what comes before."
    if for_weights:
        useless = format_bytes(scene.bytes_at_peak(for_weights))
        why += f" {useless} of them are inputs of convolutions, which only gradients of the frozen weights would need."
    calls = max((sum(call.module == path for call in scene.trace.calls) for path in paths), default=0)
    if calls > 1:
        why += f" It is called {counted(calls, 'time')}: a backward after each call (chunk) would keep the activations of one."
    elif any(_grows_with_batch(scene, number) for number in kept):
        why += " Run a few samples at a time, each with its own backward (chunk), it would keep only theirs."
    return why


def batch_activations(scene: Scene) -> Iterator[Finding]:
    """Activations that are there once for every sample."""
    batch = scene.trace.batch_size
    grow = [number for number in scene.activations if _grows_with_batch(scene, number)]
    size = scene.bytes_at_peak(grow)
    if not size or size < _LEAST_SHARE_OF_BATCH * scene.peak:
        return
    whole = scene.looks_at_the_batch_as_one
    way_out = (
        "BatchNorm needs the whole batch, so micro-batches would be another training; keeping fewer activations (saved) helps."
        if whole
        else "Micro-batches keep only a part of them at a time; keeping fewer activations (saved) helps too."
    )
    yield Finding(
        "batch_activations",
        size,
        scene.heart(grow),
        f"{share(size, scene.peak)} of the peak are activations kept for all {batch} samples at once, "
        f"{format_bytes(size // batch)} for each. {way_out}",
        "saved" if whole else "microbatch",
    )


def _grows_with_batch(scene: Scene, number: int) -> bool:
    batch, shape = scene.trace.batch_size, scene.trace.storages[number].shape
    return batch > 1 and bool(shape) and shape[0] > 0 and shape[0] % batch == 0
