"""The ways to train the lightweight type, side by side on a small grid: as it is, with the documented fixes, and with memfit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.fitting.applying import apply_plan
from recipes.kit.measuring import Measured, Way
from recipes.radar_vae.by_hand import make_by_hand
from recipes.radar_vae.data import open_data
from recipes.radar_vae.stages import judged, one_by_one

Settings = dict[str, Any]
SMALL = (8, 48, 48)
STEPS = 5
ALL_FIXES: Settings = {"part": 1, "amp": True, "checkpoint": True}
ORIGINAL, ALL_THREE, MODEL = "original", "by hand: all three", "by hand: ultra_lightweight"
_LIGHT: Settings = {"vae_type": "lightweight", "batch": 8}
_ULTRA: Settings = {"vae_type": "ultra_lightweight", "batch": 8}
BY_HAND: dict[str, Settings] = {
    ORIGINAL: _LIGHT,
    "by hand: batch 1, accumulated 8 times": _LIGHT | {"part": 1},
    "by hand: checkpoint": _LIGHT | {"checkpoint": True},
    "by hand: AMP (bfloat16)": _LIGHT | {"amp": True},
    ALL_THREE: _LIGHT | ALL_FIXES,
    MODEL: _ULTRA,
    f"{MODEL} and all three": _ULTRA | ALL_FIXES,
}
_SAME = {"by hand: batch 1, accumulated 8 times": "other noise, not proven", "by hand: checkpoint": "same bits, not proven", ORIGINAL: ""}


def ways() -> list[Way]:
    """Each by hand, and memfit in two budgets and with rounding allowed."""
    make, light = "recipes.radar_vae.by_hand:make_by_hand", _LIGHT | {"grid": SMALL}
    return [
        *(Way(name, make, settings | {"grid": SMALL}) for name, settings in BY_HAND.items()),
        Way("memfit, 800 MiB", make, light, budget="800MiB"),
        Way("memfit, 680 MiB", make, light, budget="680MiB"),
        Way("memfit, 680 MiB, rounding allowed", make, light, budget="680MiB", allow="rounded"),
    ]


def same_training(result: Measured) -> str:
    """What memfit's proof says; of what is done by hand nobody has proven anything."""
    if result.name.startswith(MODEL):
        return "no: another model"
    return result.verdict or _SAME.get(result.name, "rounded, not proven")


def learnt(way: Way, points: Path | None) -> float:
    """The loss on volumes not trained on, after a few steps: the same weights, batches and seed for every way. In a process of its own."""
    torch.manual_seed(0)
    step = make_by_hand(**way.settings)
    if way.budget is not None:
        apply_plan(step, memfit.plan(step, way.budget, allow=way.allow))
    size = step.batch_size
    train, val = open_data(None if points else "synthetic", str(points) if points else None, SMALL, STEPS * size)
    for group in step.optimizers[0].param_groups:
        group["lr"] = 1e-3
    torch.manual_seed(1)
    for first in range(0, STEPS * size, size):
        step.run(torch.stack([train[number] for number in range(first, first + size)]))
    return judged(val, one_by_one(step), size)()
