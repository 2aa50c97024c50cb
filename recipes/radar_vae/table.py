"""Measure this recipe and write its tables, README.md's and RESULTS.md's: `python recipes/radar_vae/table.py [--data-dir RADHAR.npz]`.

Without a file of radar points, what is trained is trained on synthetic volumes, and the tables say so. What takes longer, the standard type
at the whole grid, is measured by `full_size.py`.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.kit.largest import EXACT, ROUNDED, largest_by_way
from recipes.kit.measuring import Measured, apart, measure
from recipes.kit.tables import write_block, write_table
from recipes.kit.told import findings, techniques, told
from recipes.radar_vae.by_hand import make_by_hand
from recipes.radar_vae.data import Grid
from recipes.radar_vae.model import GRID
from recipes.radar_vae.ways import ALL_FIXES, ALL_THREE, BY_HAND, MODEL, ORIGINAL, SMALL, STEPS, Settings, learnt, same_training, ways

HERE = Path(__file__).resolve().parent
README, RESULTS = HERE / "README.md", HERE / "RESULTS.md"
CARD, LAPTOP = "23.64GiB", "2GiB"
STANDARD: Settings = {"vae_type": "standard", "batch": 8}
LIGHT: Settings = {"vae_type": "lightweight", "batch": 8}
ULTRA: Settings = {"vae_type": "ultra_lightweight", "batch": 8}
LADDER: dict[str, Settings] = {
    "standard, batch 8": STANDARD,
    "· batch 1, accumulated 8 times": STANDARD | {"part": 1},
    "· checkpoint": STANDARD | {"checkpoint": True},
    "· AMP": STANDARD | {"amp": True},
    "· all three": STANDARD | ALL_FIXES,
    "lightweight, batch 8": LIGHT,
    "lightweight, batch 2": LIGHT | {"batch": 2},
    "ultra_lightweight, batch 8 (another model)": ULTRA,
    "· and batch 1, accumulated 8 times": ULTRA | {"part": 1},
    "· and AMP": ULTRA | {"part": 1, "amp": True},
    "· and checkpoint: the recommendation": ULTRA | ALL_FIXES,
}
# each fix: what is claimed of it, its rung of the ladder above, and its way of the main table
CLAIMED = {
    "batch 1, accumulated 8 times": ("8", "· batch 1, accumulated 8 times", "by hand: batch 1, accumulated 8 times"),
    "checkpoint": ("2.5 to 3.3 (-60-70 %)", "· checkpoint", "by hand: checkpoint"),
    "AMP": ("1.7 to 2 (-40-50 %)", "· AMP", "by hand: AMP (bfloat16)"),
    "all three": ("", "· all three", ALL_THREE),
    "ultra_lightweight alone": ("10 (-90 % of the parameters)", "ultra_lightweight, batch 8 (another model)", MODEL),
    "ultra_lightweight and all three": ("25 to 30", "· and checkpoint: the recommendation", f"{MODEL} and all three"),
}


def predicted_peaks() -> dict[str, int]:
    """For a GPU, at the documented sizes: each fix alone, and one after the other."""
    return {name: _predicted(settings).peak_bytes for name, settings in LADDER.items()}


def _predicted(settings: Settings) -> memfit.Ledger:
    print(f"simulating {settings}", flush=True)
    step = built_without_memory(partial(make_by_hand, grid=GRID, **settings))
    return memfit.profile(step, simulate=True, device="cuda")


def write_documented(peaks: Mapping[str, int]) -> None:
    """The ladder as it is predicted."""
    first = next(iter(peaks.values()))
    rows = [[name, format_bytes(peak), f"{first / peak:.1f}"] for name, peak in peaks.items()]
    write_table(RESULTS, "documented", ["", "peak, predicted for CUDA", "times smaller than the first"], rows)


def write_composition(peaks: Mapping[str, int], found: Sequence[Measured]) -> None:
    """How many times less memory each fix takes: claimed, predicted, measured."""
    measured = {it.name: it.peak_bytes for it in found}
    rows = []
    for fix, (claimed, rung, way) in CLAIMED.items():
        predicted, seen = peaks["standard, batch 8"] / peaks[rung], measured[ORIGINAL] / measured[way]
        rows.append([fix, claimed, f"{predicted:.1f}", f"{seen:.1f}"])
    header = ["times less", "claimed", "standard, whole grid, predicted for CUDA", f"lightweight, {_words(SMALL)}, measured on a CPU"]
    write_table(README, "composition", header, rows)


def largest_here() -> dict[str, str]:
    """How many samples of the small grid a small memory holds."""
    return _largest(LAPTOP, BY_HAND, SMALL, "cpu")


def largest_on_a_card() -> dict[str, str]:
    """How many samples of the documented grid the documented card holds, by type: standard where the small grid has lightweight."""
    forms = {name: it if it["vae_type"] == "ultra_lightweight" else it | {"vae_type": "standard"} for name, it in BY_HAND.items()}
    return _largest(CARD, forms, GRID, "cuda")


def _largest(budget: str, by_hand: Mapping[str, Settings], grid: Grid, device: str) -> dict[str, str]:
    """Where a batch is accumulated, it is one part that has to fit."""
    whole = {name: partial(make_by_hand, grid=grid, **it | {"part": None}) for name, it in by_hand.items()}
    cells = largest_by_way(budget, whole, device, rounding=True)
    return cells | {name: f"{cells[name]} a part, parts without end" for name, it in by_hand.items() if "part" in it}


def trained(points: Path | None) -> dict[str, str]:
    """The validation loss that each way comes to on the same batches, each in a process of its own."""
    losses = {}
    for way in ways():
        print(f"training: {way.name}", flush=True)
        try:
            losses[way.name] = f"{apart(learnt, way, points):.4f}"
        except memfit.MemfitError as error:
            print(f"{way.name}: {error}")
            losses[way.name] = "does not fit"
    return losses


def write_main(
    found: Sequence[Measured], here: Mapping[str, str], card: Mapping[str, str], losses: Mapping[str, str], points: Path | None
) -> None:
    """The README's table: what was measured of each way, how large a batch it could have, and what it learns."""
    rows = []
    for it in found:
        kind = it.name if it.name in here else ROUNDED if "rounding" in it.name else EXACT
        cells = _measured(it, found[0]) if not it.refused else ["", "", "", it.refused, ""]
        rows.append([it.name, *cells, here[kind], card[kind], losses[it.name]])
    header = [f"lightweight, batch 8 of {_words(SMALL)}, measured", "peak", "process", "CPU time", "what it does", "the same training?"]
    header += [f"largest batch, predicted: {_words(SMALL)} in {LAPTOP}, CPU", f"standard, {_words(GRID)} in {CARD}, CUDA"]
    write_table(README, "main", [*header, f"loss after {STEPS} steps on {_named(points)}"], rows)


def _measured(it: Measured, original: Measured) -> list[str]:
    peak = f"{format_bytes(it.peak_bytes)} ({it.peak_bytes / original.peak_bytes:.2f})"
    return [peak, format_bytes(it.process_bytes), f"{it.seconds / original.seconds:.2f}", it.plan, same_training(it)]


def training(points: Path | None) -> None:
    """Both stages and the sampling, through the command, as it is and fitted: the validation loss after each few epochs."""
    data = ["--dataset_dir", str(points)] if points else ["--data", "synthetic"]
    with tempfile.TemporaryDirectory() as place:
        folders = {"original": Path(place) / "original", "memfit, 900 MiB": Path(place) / "fitted"}
        for kind, folder in folders.items():
            for flags in stages(folder, data, [] if kind == "original" else ["--budget", "900MiB"]):
                subprocess.run([sys.executable, str(HERE / "train_latent_diffusion.py"), *flags], check=True)
        write_training(folders, _named(points))


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
    write_table(RESULTS, "training", [f"validation loss on {data}", "first epoch", "a third", "two thirds", "last epoch"], rows)


def _named(points: Path | None) -> str:
    return "real radar points" if points else "synthetic volumes"


def _words(grid: tuple[int, int, int]) -> str:
    return "×".join(map(str, grid))


def write_told() -> None:
    """What memfit's commands say of the documented step."""
    program, step, card = HERE / "train_latent_diffusion.py", "make_documented_step", ("--device", "cuda")
    write_block(README, "finding", findings(told(program, "profile", "--simulate", *card, function=step), "microbatch", peak=True))
    write_block(README, "plan", techniques(told(program, "plan", "--budget", CARD, *card, function=step), lowest=True))


def side_by_side(points: Path | None) -> None:
    """The README's tables, and the whole of what they are made of."""
    peaks, found = predicted_peaks(), measure(ways(), rounds=2)
    write_documented(peaks)
    write_composition(peaks, found)
    here, card = largest_here(), largest_on_a_card()
    rows = [[name, here[name], card[name]] for name in here]
    write_table(RESULTS, "largest", ["predicted", f"{_words(SMALL)} in {LAPTOP}, CPU", f"{_words(GRID)} in {CARD}, CUDA"], rows)
    write_main(found, here, card, trained(points), points)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="Measure this recipe and write its tables.")
    parser.add_argument("--data-dir", type=Path, help="an .npz of radar points; made-up voxels without it")
    points = parser.parse_args().data_dir
    write_told()
    side_by_side(points)
    training(points)


if __name__ == "__main__":
    main()
