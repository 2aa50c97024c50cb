"""python recipes/volume_autoencoder/table.py --data-dir DIR

Measures again what README.md shows and writes it there: the ladder, the documented sizes, the largest batch, and the quality after equal
training on the volumes of DIR (synthetic ones without it). The run at 256×256×64 is high_resolution.py's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the recipe finds its neighbours from any directory

import torch

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.planning import find_plan
from memfit.levers import LEVERS
from memfit.units import format_bytes, parse_bytes
from recipes.kit.measuring import Measured, Way, measure
from recipes.kit.tables import write_table
from recipes.volume_autoencoder.config import changed, load_config
from recipes.volume_autoencoder.data import loader_of, sources_in
from recipes.volume_autoencoder.model import build_step
from recipes.volume_autoencoder.train_autoencoder import CONFIGS, step_of

README = Path(__file__).with_name("README.md")
CARD = "24GiB"
MAKE = "recipes.volume_autoencoder.train_autoencoder:step_of"
SMALL: dict[str, Any] = {"name": "default", "voxel_size": (48, 48, 32), "batch_size": 2}
RUNGS: list[tuple[str, str, dict[str, Any]]] = [
    ("AMP (bfloat16 here)", "rounded", {"mixed_precision": True}),
    ("batch 1, two accumulated", "altered", {"batch_size": 1, "gradient_accumulation_steps": 2}),
    ("no perceptual loss", "altered", {"use_perceptual_loss": False}),
    ("channels [16, 32, 64]", "altered", {"num_channels": (16, 32, 64)}),
    ("gradient checkpointing", "same", {"use_gradient_checkpointing": True}),
    ("half the resolution in plane", "altered", {"voxel_size": (24, 24, 32)}),
]
SHARES = (0.6, 0.4)  # of what the original's process holds beside interpreter and libraries, asked of memfit
DOCUMENTED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("default, 64³, batch 4, [32, 64, 64]", "~8 GB", "default", {}),
    ("the same with AMP", "~5 GB", "default", {"mixed_precision": True}),
    (
        "aggressive: 256×256×64, [16, 32, 64], AMP",
        "~12 GB",
        "preset_a",
        {"use_gradient_checkpointing": False, "gradient_accumulation_steps": 1},
    ),
    ("balanced: [24, 48, 64], AMP, perceptual, batch 1", "~18 GB", "preset_b", {"batch_size": 1, "gradient_accumulation_steps": 1}),
    ("aggressive with checkpoint", "~9 GB", "preset_a", {"gradient_accumulation_steps": 1}),
    ("preset A", "10–14 GB", "preset_a", {}),
    ("preset B", "18–22 GB", "preset_b", {}),
    ("preset C", "40 GB and more", "preset_c", {}),
]


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="Measure README.md's tables again.")
    parser.add_argument("--data-dir", type=Path, help="a folder of real volumes for the quality after equal training")
    data_dir = parser.parse_args().data_dir
    write_ladder()
    write_documented()
    write_largest()
    write_quality(data_dir)


def write_ladder() -> None:
    """Each rung alone, all together, and memfit beside them; everything measured."""
    rungs = [Way(name, MAKE, {**SMALL, **keys}) for name, _, keys in RUNGS]
    together = Way("all six together", MAKE, {k: v for keys in (SMALL, *(keys for _, _, keys in RUNGS)) for k, v in keys.items()})
    plain = memfit.profile(built_without_memory(lambda: step_of(**SMALL)), simulate=True)
    base = plain.process.base_bytes
    budgets = [base + int(share * (plain.process_bytes - base)) for share in SHARES]
    fitted = [Way(f"memfit, exact, at most {format_bytes(b)}", MAKE, SMALL, str(b)) for b in budgets]
    rounded = Way(f"memfit, rounded, at most {format_bytes(budgets[-1])}", MAKE, SMALL, str(budgets[-1]), "rounded")
    found = measure([Way("as documented", MAKE, SMALL), *rungs, together, *fitted, rounded], rounds=2)
    kinds = ["", *(kind for _, kind, _ in RUNGS), "altered"]
    rows = [_row(one, found[0], kind) for one, kind in zip(found, [*kinds, *(one.verdict for one in found[len(kinds) :])], strict=True)]
    write_table(README, "ladder", ("", "the same training?", "peak", "process", "CPU time", "how"), rows)


def _row(one: Measured, first: Measured, kind: str) -> tuple[str, ...]:
    if one.refused:
        return one.name, "–", "–", "–", "–", one.refused.splitlines()[0]
    ratio = "" if one is first else f" ({one.peak_bytes / first.peak_bytes:.2f})"
    return (
        one.name,
        kind,
        format_bytes(one.peak_bytes) + ratio,
        format_bytes(one.process_bytes),
        f"{one.seconds / first.seconds:.2f}",
        one.plan,
    )


def write_documented() -> None:
    """What was claimed for a GPU beside what a simulation of CUDA's allocator gives, with attention as MONAI writes it and fused."""
    rows = []
    for name, claimed, config, keys in DOCUMENTED:
        step = built_without_memory(lambda config=config, keys=keys: step_of(config, **keys))  # type: ignore[misc]
        plain = memfit.profile(step, simulate=True, device="cuda")
        rows.append((name, claimed, format_bytes(plain.peak_bytes), _with_fused_attention(step, plain)))
        print(rows[-1])
    write_table(README, "documented", ("", "claimed", "predicted, as configured", "predicted, attention fused"), rows)


def _with_fused_attention(step: memfit.Step, plain: memfit.Ledger) -> str:
    fused = next(option for option in LEVERS["attention"].options(plain) if option.name == "fused")
    with LEVERS["attention"].apply(step, fused):
        return format_bytes(memfit.profile(step, simulate=True, device="cuda").peak_bytes)


def write_largest() -> None:
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
    write_table(README, "largest", ("", f"largest batch in {CARD}, predicted for CUDA"), rows)


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


def write_quality(data_dir: Path | None) -> None:
    """The same volumes, the same number of steps, from the same weights: original and fitted."""
    config = changed(load_config(CONFIGS / "exact_4gib.yaml"), voxel_size=(64, 64, 48), batch_size=2, cache_rate=1.0)
    batch = next(iter(loader_of(sources_in(data_dir), config, torch.Generator().manual_seed(0))))
    rows, made = [], []
    for way in ("original", "fitted"):
        torch.manual_seed(0)
        step = build_step(config, batch, learning_rate=5e-4)
        if way == "fitted":
            ledger = memfit.profile(step, simulate=True)
            memfit.fit(step, ledger.process_high_bytes - ledger.peak_bytes // 2)
        peak = memfit.profile(step).peak_bytes
        torch.manual_seed(1)
        losses = [float(step.run(batch)["generator"]) for _ in range(_STEPS)]
        with torch.no_grad():
            made.append(step.models["autoencoder"].reconstruct(batch))  # type: ignore[operator]
        error = (made[-1] - batch).abs().mean()
        apart = f"{float((made[-1] - made[0]).abs().max()):.1e}" if way == "fitted" else ""
        rows.append((way, format_bytes(peak), f"{losses[0]:.4f} → {losses[-1]:.6f}", f"{float(error):.6f}", apart))
        print(rows[-1])
    header = ("training", "peak", f"generator's loss, {_STEPS} steps", "L1 of the reconstruction", "largest difference of a voxel")
    write_table(README, "quality", header, rows)


_STEPS = 12


if __name__ == "__main__":
    main()
