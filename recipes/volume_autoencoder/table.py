"""python recipes/volume_autoencoder/table.py --data-dir DIR

Measures again what README.md and RESULTS.md show and writes it there, on the volumes of DIR where something is trained (synthetic ones
without it). The run at 256×256×64 is high_resolution.py's, the documented sizes are documented.py's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the recipe finds its neighbours from any directory

import torch

import memfit
from memfit.units import format_bytes
from recipes.kit.largest import EXACT, ROUNDED, largest_by_way
from recipes.kit.measuring import Measured, Way, apart, measure
from recipes.kit.tables import write_table
from recipes.volume_autoencoder.config import changed, load_config
from recipes.volume_autoencoder.data import loader_of, sources_in
from recipes.volume_autoencoder.documented import write_documented, write_five, write_preset_a
from recipes.volume_autoencoder.model import build_step
from recipes.volume_autoencoder.train_autoencoder import CONFIGS
from recipes.volume_autoencoder.ways import (
    DOCUMENTED,
    HERE,
    ON_HOST,
    ORIGINAL,
    RUNGS,
    SMALL,
    STEPS,
    TOGETHER,
    by_hand,
    exact_rungs,
    for_any_batch,
    learnt,
    memfits,
    simulated,
)

README, RESULTS = Path(__file__).with_name("README.md"), Path(__file__).with_name("RESULTS.md")
CARD, LAPTOP = "24GiB", "2GiB"
NOT_RUN = {
    "DDP": "not run: one process here. BatchNorm's statistics are each device's own, as with batch 1; SyncBatchNorm is another program",
    "tiles": "not run: attention and group norms see a tile in place of the volume, and the guide does not say how tiles are joined",
}


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="Measure README.md's and RESULTS.md's tables again.")
    parser.add_argument("--data-dir", type=Path, help="a folder of real volumes to train on")
    data_dir = parser.parse_args().data_dir
    plain = simulated()
    fitted = memfits(plain)
    ladder = ladder_of(plain, fitted)
    found = measure([way for way, _ in ladder], rounds=2)
    write_ladder(found, [kind for _, kind in ladder])
    write_main(found, largest_here(), largest_on_a_card(), trained([fitted[0], fitted[-1]], data_dir), data_dir)
    write_five()
    write_documented()
    write_preset_a()
    write_same(data_dir)


def ladder_of(plain: memfit.Ledger, fitted: Sequence[Way]) -> list[tuple[Way, str]]:
    """Every way with the class of its training ("" where the proof says it): the original, exact rungs, rounded ones, altered ones last."""
    rungs = {name: Way(name, f"{HERE}:step_of", keys) for name, keys in by_hand(SMALL).items()}
    *exact, rounded = fitted
    hand = {kind: [(rungs[name], kind) for name, (of, _) in RUNGS.items() if of == kind] for kind in ("same", "rounded", "altered")}
    return [
        (rungs[ORIGINAL], "the original"),
        *exact_rungs(plain),
        *((way, "") for way in exact),
        *hand["same"],
        (Way(ON_HOST, f"{HERE}:step_on_host", SMALL), "same"),
        *hand["rounded"],
        (rounded, ""),
        *hand["altered"],
        (rungs[TOGETHER], "altered"),
    ]


def write_ladder(found: Sequence[Measured], kinds: Sequence[str]) -> None:
    """The ladder as one table; what is not run stands last, and says why."""
    rows = [_ladder_row(it, found[0], kind) for it, kind in zip(found, kinds, strict=True)]
    rows += [(name, "", "", "", "", "", why) for name, why in NOT_RUN.items()]
    header = ("", "the same training?", "peak", "process", "CPU seconds", "ratio", "how")
    write_table(RESULTS, "ladder", header, rows)


def _ladder_row(it: Measured, first: Measured, kind: str) -> tuple[str, ...]:
    if it.refused:
        return it.name, "", "", "", "", "", it.refused.splitlines()[0]
    seconds = (f"{it.seconds:.2f}", f"{it.seconds / first.seconds:.2f}")
    return it.name, kind or it.verdict, _peak(it, first), format_bytes(it.process_bytes), *seconds, it.plan


def _peak(it: Measured, first: Measured) -> str:
    return format_bytes(it.peak_bytes) + ("" if it is first else f" ({it.peak_bytes / first.peak_bytes:.2f})")


def largest_here() -> dict[str, str]:
    """How many volumes of the small size a small memory holds."""
    return largest_by_way(LAPTOP, {name: partial(for_any_batch, **keys) for name, keys in by_hand(SMALL).items()}, "cpu", rounding=True)


def largest_on_a_card() -> dict[str, str]:
    """How many volumes of the documented size the card of preset A holds."""
    return largest_by_way(CARD, {name: partial(for_any_batch, **keys) for name, keys in by_hand(DOCUMENTED).items()}, "cuda", rounding=True)


def trained(fitted: Sequence[Way], data_dir: Path | None) -> dict[str, str]:
    """What each way of the main table, the rungs by hand and these, comes to after equal training, each in a process of its own."""
    rungs = [Way(name, "", keys) for name, keys in by_hand(SMALL).items()]
    losses = {}
    for way in (*rungs, *fitted):
        print(f"training: {way.name}", flush=True)
        losses[way.name] = apart(learnt, way, data_dir)
    return losses


def write_main(
    found: Sequence[Measured], here: Mapping[str, str], card: Mapping[str, str], losses: Mapping[str, str], data_dir: Path | None
) -> None:
    """The README's table: the ladder's rungs by hand and memfit, how large a batch each could have, and what it learns."""
    rows = []
    for it in (it for it in found if it.name in losses):
        kind = it.name if it.name in here else ROUNDED if "rounded" in it.name else EXACT
        measured = (_peak(it, found[0]), format_bytes(it.process_bytes), f"{it.seconds / found[0].seconds:.2f}")
        rows.append((it.name, *(("does not fit", "", "") if it.refused else measured), here[kind], card[kind], losses[it.name]))
    header = [
        f"{_words(SMALL)}, batch 2, measured",
        "peak",
        "process",
        "CPU time",
        f"largest batch, predicted: {_words(SMALL)} in {LAPTOP}, CPU",
    ]
    header += [
        f"predicted: {_words(DOCUMENTED)} in {CARD}, CUDA",
        f"L1 after {STEPS} steps on {'real brains' if data_dir else 'made-up volumes'}",
    ]
    write_table(README, "main", header, rows)


def _words(size: Mapping[str, Sequence[int]]) -> str:
    return "×".join(map(str, size["voxel_size"]))


def write_same(data_dir: Path | None) -> None:
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
        apart_by = f"{float((made[-1] - made[0]).abs().max()):.1e}" if way == "fitted" else ""
        rows.append((way, format_bytes(peak), f"{losses[0]:.4f} → {losses[-1]:.6f}", f"{float(error):.6f}", apart_by))
        print(rows[-1])
    header = ("training", "peak", f"generator's loss, {_STEPS} steps", "L1 of the reconstruction", "largest difference of a voxel")
    write_table(RESULTS, "same", header, rows)


_STEPS = 12


if __name__ == "__main__":
    main()
