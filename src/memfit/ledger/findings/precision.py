"""Activations that could be kept in half as many bits."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.ledger.findings.operators import FLOAT32_UNDER_AUTOCAST, word
from memfit.ledger.findings.scene import Scene
from memfit.records import Finding
from memfit.units import format_bytes

_LEAST_SHARE = 0.05


def full_precision(scene: Scene) -> Iterator[Finding]:
    """float32 activations where half of the bits would be as fast or faster."""
    full = [number for number, storage in scene.activations.items() if storage.dtype == "float32" and _is_halved(scene, number)]
    size = scene.bytes_at_peak(full)
    if not scene.trace.half_is_cheap or not size or size // 2 < _LEAST_SHARE * scene.peak:
        return
    yield Finding(
        "full_precision",
        size // 2,
        scene.heart(full),
        f"{format_bytes(size)} of activations are kept in float32 by operators that autocast would run in bfloat16: up to "
        f"{format_bytes(size // 2)} less, and {scene.trace.device} computes no slower; results are rounded.",
        "precision",
    )


def _is_halved(scene: Scene, number: int) -> bool:
    maker = scene.maker(number)
    return maker is not None and word(maker) not in FLOAT32_UNDER_AUTOCAST
