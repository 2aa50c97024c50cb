"""What whole networks and their optimizers hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import is_under, share
from memfit.records import Finding, Model
from memfit.units import format_bytes

_LEAST_SHARE_OF_STATES = 0.15
_LEAST_SHARE_OF_NETWORK = 0.05
_STATE = re.compile(r"(\w+)\['(\w+)'\]")  # AdamW['exp_avg']


def optimizer_states(scene: Scene) -> Iterator[Finding]:
    """What the optimizers keep from step to step."""
    states = [s for s in scene.alive.values() if s.kind == "optimizer"]
    size = sum(s.bytes for s in states)
    trained = sum(s.bytes for s in scene.alive.values() if s.kind == "gradients" or s.kind == "parameters" and not _is_frozen(scene, s.name))
    if not size or size < _LEAST_SHARE_OF_STATES * scene.peak:
        return
