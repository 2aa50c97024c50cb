"""What whole networks and their optimizers hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import is_under, share
from memfit.records import Finding, Model
from memfit.units import format_bytes

_LEAST_SHARE_OF_STATES = 0.15
_LEAST_SHARE_OF_NETWORK = 0.05
_STATE = re.compile(r"(\w+)\['(\w+)'\]")  # AdamW['exp_avg']


def optimizer_states(scene: Scene) -> Iterator[Finding]:
    """What the optimizers keep from step to step."""
    states = [storage for storage in scene.alive.values() if storage.kind == "optimizer"]
    size = sum(storage.bytes for storage in states)
    if not size or size < _LEAST_SHARE_OF_STATES * scene.peak:
        return
    optimizers, tables = _named(storage.name for storage in states if storage.shape)
    weights = _trained_bytes(scene)
    multiple = f", {size / weights:.1f} times the parameters it trains" if weights else ""
    yield Finding(
        "optimizer_states",
        size,
        optimizers or "the optimizer",
        f"{optimizers or 'The optimizer'} keeps {tables or 'states'} between steps: {format_bytes(size)}{multiple}, and "
        f"{share(size, scene.peak)} of the peak. States in fewer bits or factored ones take a part of that.",
        "optimizer",
    )


def _named(names: Iterable[str]) -> tuple[str, str]:
    """The optimizers and their tables, from the names of states."""
    pairs = dict.fromkeys((found[1], found[2]) for name in names if (found := _STATE.match(name)))
    return ", ".join(dict.fromkeys(who for who, _ in pairs)), " and ".join(dict.fromkeys(what for _, what in pairs))


def _trained_bytes(scene: Scene) -> int:
    frozen = [path for model in scene.trace.models for path in model.frozen]
    parameters = (storage for storage in scene.alive.values() if storage.kind == "parameters")
    return sum(storage.bytes for storage in parameters if not any(is_under(storage.name, path) for path in frozen))


def side_networks(scene: Scene) -> Iterator[Finding]:
    """Networks beside the one that is trained: perceptual networks, discriminators, teachers, frozen decoders."""
    models = scene.trace.models
    main = max((model for model in models if model.trained), key=lambda model: model.parameters_bytes, default=None)
    for model in models:
        activations = _activations_in(scene, model)
        size = model.parameters_bytes + activations
        if model is main or size < max(1, _LEAST_SHARE_OF_NETWORK * scene.peak):
            continue
        role = "is trained beside the largest network" if model.trained else "is not trained, yet the loss goes through it"
        yield Finding(
            "side_network",
            size,
            model.name or model.kind,
            f"{model.kind} {role} and takes {share(size, scene.peak)} of the peak: "
            f"{format_bytes(model.parameters_bytes)} of parameters and {format_bytes(activations)} of activations alive then.",
            _lever_for(model, activations),
        )


def _activations_in(scene: Scene, model: Model) -> int:
    others = [other.name for other in scene.trace.models if len(other.name) > len(model.name) and is_under(other.name, model.name)]
    owners = (owner for owner in scene.owners if owner.category == "activations" and is_under(owner.module, model.name))
    return sum(owner.bytes for owner in owners if not any(is_under(owner.module, other) for other in others))


def _lever_for(model: Model, activations: int) -> str:
    """Activations can be kept differently; parameters that nobody trains can be held in fewer bits; else it takes a smaller network."""
    if activations > model.parameters_bytes:
        return "saved"
    return "architecture" if model.trained else "precision"
