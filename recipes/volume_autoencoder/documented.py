"""The guide's configurations: what it claims for a GPU, what a simulation of CUDA's allocator predicts, and what can be run here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.planning import find_plan
from memfit.levers import LEVERS
from memfit.units import format_bytes, parse_bytes
from recipes.kit.measuring import Way, measure
from recipes.kit.tables import write_table
from recipes.volume_autoencoder.train_autoencoder import step_of

RESULTS = Path(__file__).with_name("RESULTS.md")
CARD = "24GiB"
ONE_AT_A_TIME = {"batch_size": 1, "gradient_accumulation_steps": 1}
# the guide's table of five: what it claims of memory and speed, and its keys
FIVE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "default, 64³, batch 4, [32, 64, 64]": ("~8 GB", "1.0x", {"name": "default"}),
    "the same with AMP": ("~5 GB", "1.1x", {"name": "default", "mixed_precision": True}),
    "aggressive: 256×256×64, [16, 32, 64], AMP": (
        "~12 GB",
        "0.3x",
        {"name": "preset_a", "use_gradient_checkpointing": False} | ONE_AT_A_TIME,
    ),
    "balanced: [24, 48, 64], AMP, perceptual, batch 1": ("~18 GB", "0.25x", {"name": "preset_b"} | ONE_AT_A_TIME),
    "aggressive with checkpoint": ("~9 GB", "0.2x", {"name": "preset_a"} | ONE_AT_A_TIME),
}
PRESETS = {"preset A": ("10–14 GB", "preset_a"), "preset B": ("18–22 GB", "preset_b"), "preset C": ("40 GB and more", "preset_c")}


def write_five() -> None:
    """The guide's own table again: each axis of a volume at 3/8, which a CPU runs and every network still takes."""
    ways = [Way(name, "recipes.volume_autoencoder.train_autoencoder:step_of", _scaled(keys)) for name, (_, _, keys) in FIVE.items()]
    found = measure(ways, rounds=1)
    rows = []
    for it, (claimed, speed, keys) in zip(found, FIVE.values(), strict=True):
        measured = (f"{format_bytes(it.peak_bytes)} ({it.peak_bytes / found[0].peak_bytes:.2f})", format_bytes(it.process_bytes))
        rows.append(
            (it.name, claimed, format_bytes(_predicted(keys)[1].peak_bytes), *measured, speed, f"{found[0].seconds / it.seconds:.2f}")
        )
    header = (
        "",
        "claimed",
        "peak predicted for CUDA",
        "3/8 of each axis, measured on a CPU: peak",
        "process",
        "speed claimed",
        "speed measured",
    )
    write_table(RESULTS, "five", header, rows)


def _scaled(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"voxel_size": (24, 24, 24) if keys["name"] == "default" else (96, 96, 24)}


def _predicted(keys: dict[str, Any]) -> tuple[memfit.Step, memfit.Ledger]:
    step = built_without_memory(partial(step_of, **keys))
    return step, memfit.profile(step, simulate=True, device="cuda")


def write_documented() -> None:
    """What was claimed for a GPU beside what a simulation of CUDA's allocator gives, with attention as MONAI writes it and fused."""
    claims = [(name, claimed, keys) for name, (claimed, _, keys) in FIVE.items()]
    claims += [(name, claimed, {"name": config}) for name, (claimed, config) in PRESETS.items()]
    rows = []
    for name, claimed, keys in claims:
        step, plain = _predicted(keys)
        rows.append((name, claimed, format_bytes(plain.peak_bytes), _with_fused_attention(step, plain)))
        print(rows[-1])
    write_table(RESULTS, "documented", ("", "claimed", "predicted, as configured", "predicted, attention fused"), rows)


def _with_fused_attention(step: memfit.Step, plain: memfit.Ledger) -> str:
    fused = next(option for option in LEVERS["attention"].options(plain) if option.name == "fused")
    with LEVERS["attention"].apply(step, fused):
        return format_bytes(memfit.profile(step, simulate=True, device="cuda").peak_bytes)


def write_preset_a() -> None:
    """Volumes of 256×256×64 on the card that preset A is for, without what it does by hand; and with it.

    A batch is built anew for each size: the recipe's loss takes a batch above the configured one in parts.
    """
    plain = {"gradient_accumulation_steps": 1, "mixed_precision": False, "use_gradient_checkpointing": False}
    forms = {
        "channels, losses and discriminator of preset A": {},
        "by hand: gradient checkpointing": {"use_gradient_checkpointing": True},
        "by hand: AMP and gradient checkpointing": {"use_gradient_checkpointing": True, "mixed_precision": True},
    }
    rows = [(name, str(_most(partial(_is_inside, plain | keys)))) for name, keys in forms.items()]
    rows.append(("memfit, exact", str(_most(partial(_has_plan, plain)))))
    write_table(RESULTS, "largest", ("", f"largest batch in {CARD}, predicted for CUDA"), rows)


def _most(fits: Callable[[int], bool]) -> int:
    batch = 0
    while fits(batch + 1):
        batch += 1
    return batch


def _on_card(keys: dict[str, Any], batch: int) -> memfit.Step:
    print(f"preset A, {keys}, batch {batch}", flush=True)
    return built_without_memory(lambda: step_of("preset_a", batch_size=batch, **keys))


def _is_inside(keys: dict[str, Any], batch: int) -> bool:
    return memfit.profile(_on_card(keys, batch), simulate=True, device="cuda").process_high_bytes <= parse_bytes(CARD)


def _has_plan(keys: dict[str, Any], batch: int) -> bool:
    try:
        return find_plan(_on_card(keys, batch), CARD, device="cuda", quick=True).plan.feasible
    except memfit.Infeasible:
        return False
