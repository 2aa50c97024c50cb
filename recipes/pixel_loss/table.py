"""python recipes/pixel_loss/table.py

Measures this recipe again and rewrites its tables, the README's one and those of RESULTS.md: over an hour on two cores, and well over that
without AVX-512. Where the original does not fit this machine it is not run: what the others save is of its predicted peak, and their times
are those of the first way that was run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere, as the recipe does

import torch

import memfit
from memfit.fitting.applying import apply_levers
from memfit.levers import LEVERS
from memfit.records import PlannedLever
from memfit.units import format_bytes
from recipes.kit.budget import levers_in_words
from recipes.kit.largest import EXACT, ROUNDED, largest_by_way
from recipes.kit.measuring import Measured, Way, measure
from recipes.kit.tables import write_block, write_table
from recipes.kit.told import findings, techniques, told
from recipes.pixel_loss.train import make_step
from recipes.pixel_loss.ways import (
    BY_HAND,
    CHUNKS,
    HAND_FIX,
    HERE,
    ORIGINAL,
    Case,
    asked_in_words,
    make_original,
    measured,
    measured_row,
    one_at_a_time,
    planned,
    saved,
    simulated,
)

README, RESULTS = Path(__file__).with_name("README.md"), Path(__file__).with_name("RESULTS.md")
MAIN = Case(256, 4, (0.2, 0.15), (0.15,), by_hand=tuple(BY_HAND))
MEASURED = (
    Case(64, 4, (0.4,), by_hand=(ORIGINAL, CHUNKS, HAND_FIX)),
    Case(512, 1, (0.42, 0.38)),
    Case(1024, 1, (0.45, 0.38)),
)
PREDICTED = (Case(512, 1, (0.42, 0.38)), Case(512, 4, (0.15, 0.1), (0.1,)), Case(1024, 1, (0.45, 0.38)), Case(1024, 4, (0.15,)))
COMPARED = Case(32, 4)
EIGHT, EIGHT_RUN = (256, 512, 1024), 256
EPOCHS = "5"
TRAINED = ["--data", "synthetic", "--image-size", "64", "--batch-size", "4", "--images", "16", "--epochs", EPOCHS]
# how each way of the main table is trained: images decoded at a time, and flags
TRAINING: dict[str, tuple[int, list[str]]] = {
    name: (fixes.get("chunk_size", 4), ["--hand-fix"] if "hand_fix" in fixes else []) for name, fixes in BY_HAND.items()
} | {
    "memfit, exact, --budget 900MiB": (4, ["--budget", "900MiB"]),
    "memfit, exact, --budget 800MiB": (4, ["--budget", "800MiB"]),
    "memfit, rounding allowed, --budget 800MiB": (4, ["--budget", "800MiB", "--allow", "rounded"]),
}


def predicted_rows(case: Case) -> list[list[str]]:
    """What each way is predicted to need."""
    original = memfit.profile(simulated(case), simulate=True).peak_bytes
    fixed = memfit.profile(simulated(case, hand_fix=True), simulate=True).peak_bytes
    rows = [[case.name, ORIGINAL, format_bytes(original), "", ""]]
    rows.append([case.name, HAND_FIX, format_bytes(fixed), saved(fixed, original), ""])
    for share, allow in case.asked:
        try:
            plan = planned(case, share, allow)
        except memfit.MemfitError as error:
            print(f"{case.name}, {share:.0%}: {error}")
            continue
        peak = plan.predicted_peak_bytes
        cost, words = f"{plan.predicted_slowdown:.2f}", f"{asked_in_words(share, allow)}: {levers_in_words(plan)}"
        rows.append([case.name, words, format_bytes(peak), saved(peak, original), cost])
    return rows


def measured_rows(case: Case) -> list[list[str]]:
    """What each way was seen to need."""
    found = measured(case)
    return [measured_row(case, result, found) for result in found]


def eight_row(size: int) -> list[str]:
    """Eight images a chunk of one at a time beside one image, both predicted."""
    eight = simulated(Case(size, 8))
    with LEVERS["chunk"].apply(eight, one_at_a_time(Case(size, 8))):
        chunked = memfit.profile(eight, simulate=True).peak_bytes
    return _eight(size, "predicted", memfit.profile(simulated(Case(size, 1)), simulate=True).peak_bytes, chunked)


def eight_row_measured(size: int) -> list[str]:
    """The same, both really run."""
    one = Way("one image", f"{HERE}:make_original", Case(size, 1).sizes)
    eight = Way("eight, one at a time", f"{HERE}:make_one_at_a_time", Case(size, 8).sizes)
    return _eight(size, "measured", *(it.peak_bytes for it in measure([one, eight], rounds=0)))


def _eight(size: int, how: str, one: int, eight: int) -> list[str]:
    return [f"{size}², {how}", format_bytes(one), format_bytes(eight), f"{eight / one:.3f}"]


def gradient_rows(case: Case) -> list[list[str]]:
    """How far llm2vae's gradients are from the original's, really run, for each way."""
    expected = _gradient(make_original(**case.sizes))
    rows = [[name, _distance(_gradient(make_original(**case.sizes, **BY_HAND[name])), expected)] for name in (CHUNKS, HAND_FIX)]
    for option in [*LEVERS["saved"].options(memfit.profile(simulated(case), simulate=True)), one_at_a_time(case)]:
        step = make_step(**case.sizes)
        apply_levers(step, [PlannedLever(option.lever, option.name, option.exactness, settings=option.settings)])
        rows.append([f"{option.lever}: {option.name} ({option.exactness})", _distance(_gradient(step), expected)])
    return rows


def _gradient(step: memfit.Step) -> torch.Tensor:
    step.run(step.batch)
    model: Any = step.model
    gradient: torch.Tensor = model.llm2vae.weight.grad
    return gradient


def _distance(gradient: torch.Tensor, expected: torch.Tensor) -> str:
    return "same bits" if torch.equal(gradient, expected) else f"{float((gradient - expected).norm() / expected.norm()):.1e}"


def training_row(way: str) -> list[str]:
    """The recipe itself, trained on its own pictures: loss and PSNR after the first epoch, and after the last."""
    chunk, flags = TRAINING[way]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("train.py")), *TRAINED, *flags, "--output-dir", folder]
        chunks = {**os.environ, "PIXEL_LOSS_CHUNK_SIZE": str(chunk)}
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=chunks)
    if ended.returncode == 1:  # memfit's honest no
        return [way, *("does not fit", "") * 2]
    ended.check_returncode()
    epochs = re.findall(r"pixel loss ([\d.]+) \| PSNR ([\d.]+) dB", ended.stdout)
    return [way, *epochs[0], *epochs[-1]]


def largest_here() -> dict[str, str]:
    """Images of 256² in what a small machine has."""
    return largest_by_way("8GiB", _forms(256), "cpu", rounding=True)


def largest_on_a_card() -> dict[str, str]:
    """Images of 512² on a card of 24 GiB."""
    return largest_by_way("24GiB", _forms(512), "cuda", rounding=True)


def _forms(size: int) -> dict[str, partial[memfit.Step]]:
    return {name: partial(make_original, size, 4, **settings) for name, settings in BY_HAND.items()}


def write_main(found: Sequence[Measured], here: dict[str, str], card: dict[str, str], trained: Sequence[Sequence[str]]) -> None:
    """The README's table: what was measured of each way, how large a batch it could have, and what it learns."""
    rows = []
    for result, learnt in zip(found, trained, strict=True):
        kind = result.name if result.name in here else ROUNDED if result.name.startswith(ROUNDED) else EXACT
        _, *cells = measured_row(MAIN, result, found)
        rows.append([*cells, here[kind], card[kind], f"{learnt[-2]}, {learnt[-1]} dB" if learnt[-1] else learnt[-2]])
    header = [f"{MAIN.name}, measured", "peak", "saved", "process", "CPU time", "what it does"]
    header += [f"largest batch, predicted: {room}" for room in ("256² in 8 GiB, CPU", "512² in 24 GiB, CUDA")]
    write_table(README, "main", [*header, f"loss, PSNR after {EPOCHS} epochs of 64²"], rows)


def side_by_side() -> None:
    """The README's table, and the whole of what it is made of."""
    trained = [training_row(way) for way in TRAINING]
    write_table(RESULTS, "training", ("way", "loss, epoch 1", "PSNR", f"loss, epoch {EPOCHS}", "PSNR"), trained)
    here, card = largest_here(), largest_on_a_card()
    largest = [[name, here[name], card[name]] for name in here]
    write_table(RESULTS, "largest", ("", "256² in 8 GiB, predicted for CPU", "512² in 24 GiB, predicted for CUDA"), largest)
    write_main(measured(MAIN), here, card, trained)


def write_told() -> None:
    """What memfit's commands say of the documented size."""
    program, four = Path(__file__).with_name("train.py"), "make_512_four"
    write_block(README, "finding", findings(told(program, "profile", "--simulate", function=four), "saved", peak=True))
    write_block(README, "plan", techniques(told(program, "plan", "--budget", "4GiB", function=four)))


def main() -> None:
    """All tables, the quick ones first."""
    write_told()
    predicted = [row for case in PREDICTED for row in predicted_rows(case)]
    write_table(RESULTS, "predicted", ("images", "way", "peak", "saved", "time"), predicted)
    eight = [*(eight_row(size) for size in EIGHT), eight_row_measured(EIGHT_RUN)]
    write_table(RESULTS, "eight", ("images", "one, original", "eight, one at a time", "ratio"), eight)
    write_table(RESULTS, "gradients", ("way", "distance from the original's"), gradient_rows(COMPARED))
    side_by_side()
    rows = [row for case in MEASURED for row in measured_rows(case)]
    write_table(RESULTS, "measured", ("images", "way", "peak", "saved", "process", "CPU time", "what it does"), rows)


if __name__ == "__main__":
    main()
