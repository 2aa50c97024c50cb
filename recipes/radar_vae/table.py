"""Measure this recipe and write the tables of its README: `python recipes/radar_vae/table.py [--data-dir RADHAR.npz]`.

Without a file of radar points, the training table is made on synthetic volumes and says so. What takes longer, the standard type at the
whole grid, is measured by `full_size.py`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.kit.largest import write_largest
from recipes.kit.measuring import Measured, Way, measure
from recipes.kit.tables import write_table
from recipes.radar_vae.by_hand import make_by_hand
from recipes.radar_vae.model import GRID

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
SMALL = (8, 48, 48)
_MAKE = "recipes.radar_vae.by_hand:make_by_hand"

Settings = dict[str, Any]
ULTRA: Settings = {"vae_type": "ultra_lightweight", "batch": 8}
LIGHT: Settings = {"vae_type": "lightweight", "batch": 8}
STANDARD: Settings = {"vae_type": "standard", "batch": 8}
ALL_FIXES: Settings = {"part": 1, "amp": True, "checkpoint": True}


def documented_ladder() -> None:
    """Predicted for a GPU, at the documented sizes: each fix alone, and one after the other."""
    rows = [
        ("standard, batch 8", STANDARD),
        ("· batch 1, accumulated 8 times", STANDARD | {"part": 1}),
        ("· checkpoint", STANDARD | {"checkpoint": True}),
        ("· AMP", STANDARD | {"amp": True}),
        ("· all three", STANDARD | ALL_FIXES),
        ("lightweight, batch 8", LIGHT),
        ("lightweight, batch 2", LIGHT | {"batch": 2}),
        ("ultra_lightweight, batch 8 (another model)", ULTRA),
        ("· batch 1, accumulated 8 times", ULTRA | {"part": 1}),
        ("· and AMP", ULTRA | {"part": 1, "amp": True}),
        ("· and checkpoint: the recommendation", ULTRA | ALL_FIXES),
    ]
    peaks = [_predicted(settings).peak_bytes for _, settings in rows]
    cells = [[name, format_bytes(peak), f"{peaks[0] / peak:.1f}"] for (name, _), peak in zip(rows, peaks, strict=True)]
    write_table(README, "documented", ["", "peak, predicted for CUDA", "times smaller than the first"], cells)


def _predicted(settings: Settings) -> memfit.Ledger:
    print(f"simulating {settings}", flush=True)
    step = built_without_memory(partial(make_by_hand, grid=GRID, **settings))
    return memfit.profile(step, simulate=True, device="cuda")


def largest() -> None:
    """How many samples of the documented grid the documented card holds."""
    forms = {
        "standard, as documented": STANDARD,
        "by hand: checkpoint": STANDARD | {"checkpoint": True},
        "by hand: AMP": STANDARD | {"amp": True},
        "by hand: AMP and checkpoint": STANDARD | {"amp": True, "checkpoint": True},
    }
    write_largest(README, "23.64GiB", {name: partial(make_by_hand, grid=GRID, **form) for name, form in forms.items()}, "cuda")


def measured_ladder() -> None:
    """Measured here, on a smaller grid: the documented fixes beside memfit."""
    light, ultra = LIGHT | {"grid": SMALL}, ULTRA | {"grid": SMALL}
    ways = [
        Way("original: lightweight, batch 8", _MAKE, light),
        Way("by hand: batch 1, accumulated 8 times", _MAKE, light | {"part": 1}),
        Way("by hand: checkpoint", _MAKE, light | {"checkpoint": True}),
        Way("by hand: AMP (bfloat16)", _MAKE, light | {"amp": True}),
        Way("by hand: all three", _MAKE, light | ALL_FIXES),
        Way("by hand: ultra_lightweight and all three", _MAKE, ultra | ALL_FIXES),
        Way("memfit, 800 MiB", _MAKE, light, budget="800MiB"),
        Way("memfit, 680 MiB", _MAKE, light, budget="680MiB"),
        Way("memfit, 680 MiB, rounding allowed", _MAKE, light, budget="680MiB", allow="rounded"),
    ]
    found = measure(ways, rounds=2)
    header = ["", "peak", "process", "CPU time", "what it did", "the same training?"]
    write_table(README, "measured", header, [_row(result, found[0]) for result in found])


def _row(result: Measured, original: Measured) -> list[str]:
    if result.refused:
        return [result.name, "", "", "", result.refused, ""]
    peak = f"{format_bytes(result.peak_bytes)} ({result.peak_bytes / original.peak_bytes:.2f})"
    judged = result.verdict or ("" if result is original else _BY_HAND.get(result.name.removeprefix("by hand: "), "rounded, not proven"))
    return [result.name, peak, format_bytes(result.process_bytes), f"{result.seconds / original.seconds:.2f}", result.plan, judged]


_BY_HAND = {
    "batch 1, accumulated 8 times": "other noise, not proven",
    "checkpoint": "same bits, not proven",
    "ultra_lightweight and all three": "no: another model",
}


def training(points: Path | None) -> None:
    """Both stages and the sampling, through the command, as it is and fitted: the validation loss after each few epochs."""
    data = ["--dataset_dir", str(points)] if points else ["--data", "synthetic"]
    with tempfile.TemporaryDirectory() as place:
        folders = {"original": Path(place) / "original", "memfit, 900 MiB": Path(place) / "fitted"}
        for kind, folder in folders.items():
            for flags in stages(folder, data, [] if kind == "original" else ["--budget", "900MiB"]):
                subprocess.run([sys.executable, str(HERE / "train_latent_diffusion.py"), *flags], check=True)
        write_training(folders, "real radar points" if points else "synthetic volumes")


def stages(folder: Path, data: list[str], more: list[str]) -> list[list[str]]:
    """The flags of the three commands, one after the other."""
    common = [*data, "--max_samples", "128", "--output-dir", str(folder), "--num_workers", "0", "--batch_size", "8"]
    vae = ["--vae_type", "ultra_lightweight", "--grid", "8", "64", "64", "--lr", "1e-3", "--vae_epochs", "6"]
    checkpoints = ["--vae_ckpt", str(folder / "vae/last.pt"), "--ldm_ckpt", str(folder / "ldm/last.pt")]
    return [
        ["--mode", "train_vae", *common, *vae, *more],
        ["--mode", "train_ldm", *common, *checkpoints, "--lr", "3e-4", "--ldm_epochs", "12"],
        ["--mode", "sample", *common, *checkpoints],
    ]


def write_training(folders: dict[str, Path], data: str) -> None:
    """Validation losses out of the runs' logs."""
    rows = []
    for kind, folder in folders.items():
        for stage in ("vae", "ldm"):
            losses = [row["val_loss"] for row in csv.DictReader((folder / stage / "log.csv").open())]
            rows.append([f"{kind}: {stage}", *(losses[number * len(losses) // 3 - 1] if number else losses[0] for number in range(4))])
    write_table(README, "training", [f"validation loss on {data}", "first epoch", "a third", "two thirds", "last epoch"], rows)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="Measure this recipe and write the tables of its README.")
    parser.add_argument("--data-dir", type=Path, help="an .npz of radar points; made-up voxels without it")
    points = parser.parse_args().data_dir
    documented_ladder()
    largest()
    measured_ladder()
    training(points)


if __name__ == "__main__":
    main()
