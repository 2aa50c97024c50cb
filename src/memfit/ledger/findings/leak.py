"""Memory that each step adds and never frees."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import place, sizes
from memfit.records import Finding
from memfit.units import format_bytes


def leak(scene: Scene) -> Iterator[Finding]:
    """A tensor kept alive between steps."""
    growth = scene.trace.growth_bytes
    if growth <= 0:
        return
    left = [s for s in scene.trace.storages if s.born >= 0 and s.died is None and not s.kind]
    largest = max(left, key=lambda storage: storage.bytes, default=None)
    maker = scene.trace.ops[largest.born] if largest else None
    what = f"; the largest, of {sizes(largest.shape)}, is made at this line" if largest else ""
    yield Finding(
        "leak",
        growth,
        place(maker.module, maker.source) if maker else "",
        f"Every step leaves {format_bytes(growth)} behind that nothing frees: a tensor kept alive between steps{what}. "
        "Keep .item() of a number, or .detach() of a tensor that must stay, and drop it when it has been used.",
        "",
    )
