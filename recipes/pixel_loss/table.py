"""python recipes/pixel_loss/table.py

Measures the README's tables again and rewrites them: over an hour on two cores, and well over that without AVX-512. Where the original does
not fit this machine it is not run: what the others save is of its predicted peak, and their times are of the documented fix's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere, as the recipe does

import psutil
import torch

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_levers, apply_plan
from memfit.levers import LEVERS
from memfit.records import Plan, PlannedLever
from memfit.units import format_bytes
from recipes.kit.budget import levers_in_words
from recipes.kit.largest import write_largest
from recipes.kit.measuring import Measured, Way, measure
from recipes.kit.tables import write_table
from recipes.pixel_loss.loss import Chunks
from recipes.pixel_loss.train import make_step

README, HERE = Path(__file__).with_name("README.md"), "recipes.pixel_loss.table"
DOCUMENTED_CHUNKS, HAND_FIX = "PIXEL_LOSS_CHUNK_SIZE=1, as documented", "documented fix: two finest levels checkpointed"


@dataclass(frozen=True)
class Case:
    """Images of one size, and how much of the original's process memfit may use, exactly and with rounding allowed."""

    image_size: int
    batch_size: int
    shares: tuple[float, ...]
    rounded: tuple[float, ...] = ()
    documented_chunks: bool = False

    @property
    def asked(self) -> list[tuple[float, str]]:
        """What memfit is asked for: a share, and the loosest class of exactness it may use."""
        return [(share, "reordered") for share in self.shares] + [(share, "rounded") for share in self.rounded]

    @property
    def name(self) -> str:
        """As a table says it."""
        return f"{self.batch_size} × {self.image_size}²"


MEASURED = (
    Case(64, 4, (0.4,), documented_chunks=True),
    Case(256, 4, (0.2, 0.15), (0.15,)),
    Case(512, 1, (0.42, 0.38)),
    Case(1024, 1, (0.45, 0.38)),
)
PREDICTED = (Case(512, 1, (0.42, 0.38)), Case(512, 4, (0.15, 0.1), (0.1,)), Case(1024, 1, (0.45, 0.38)), Case(1024, 4, (0.15,)))
COMPARED = Case(32, 4, ())
EIGHT = (256, 512, 1024)
EPOCHS, BUDGET = "5", "900MiB"
TRAINED = ["--data", "synthetic", "--image-size", "64", "--batch-size", "4", "--images", "16", "--epochs", EPOCHS]


def make_original(image_size: int, batch_size: int, hand_fix: bool = False, chunk_size: int | None = None) -> memfit.Step:
    """The step as it is documented."""
    return make_step(image_size, batch_size, hand_fix, Chunks(chunk_size) if chunk_size else None)


def make_planned(image_size: int, batch_size: int, plan: str) -> memfit.Step:
    """The step with a plan on."""
    step = make_step(image_size, batch_size)
    apply_plan(step, Plan.load(plan))
    return step


def simulated(case: Case, **settings: Any) -> memfit.Step:
    """Without memory for it."""
    return built_without_memory(lambda: make_original(case.image_size, case.batch_size, **settings))


def planned(case: Case, share: float, allow: str) -> Plan | None:
    """The plan for a process that may use this share of the original's; None where there is none."""
    step = simulated(case)
    ledger = memfit.profile(step, simulate=True)
    base = ledger.process.base_bytes
    budget = base + int((ledger.process_high_bytes - base) * share)
    try:
        return memfit.plan(step, budget, allow=allow)
    except memfit.MemfitError as error:
        print(f"{case.name}, {share:.0%}: {error}")
        return None


def in_words(plan: Plan, allow: str) -> str:
    """A table's name for it."""
    return f"memfit, {'rounding allowed: ' if allow == 'rounded' else ''}{levers_in_words(plan)}"


def predicted_rows(case: Case) -> list[list[str]]:
    """What each way is predicted to need."""
    original = memfit.profile(simulated(case), simulate=True).peak_bytes
    fixed = memfit.profile(simulated(case, hand_fix=True), simulate=True).peak_bytes
    rows = [[case.name, "original", format_bytes(original), "", ""], [case.name, HAND_FIX, *_saved(fixed, original), ""]]
    for share, allow in case.asked:
        if plan := planned(case, share, allow):
            cost = f"{plan.predicted_slowdown:.2f}"
            rows.append([case.name, in_words(plan, allow), *_saved(plan.predicted_peak_bytes, original), cost])
    return rows


def measured_rows(case: Case, folder: Path) -> list[list[str]]:
    """Each way in a process of its own, timed in turns."""
    sizes = {"image_size": case.image_size, "batch_size": case.batch_size}
    original = f"{HERE}:make_original"
    ways = [Way("original", original, sizes), Way(HAND_FIX, original, {**sizes, "hand_fix": True})]
    if case.documented_chunks:
        ways.insert(1, Way(DOCUMENTED_CHUNKS, original, {**sizes, "chunk_size": 1}))
    for share, allow in case.asked:
        if plan := planned(case, share, allow):
            path = folder / f"{case.image_size}_{case.batch_size}_{share}_{allow}.json"
            plan.save(path)
            ways.append(Way(in_words(plan, allow), f"{HERE}:make_planned", {**sizes, "plan": str(path)}))
    too_large = _too_large(case)
    found = [too_large, *measure(ways[1:], rounds=3)] if too_large else measure(ways, rounds=3)
    return [_measured_row(case, result, found) for result in found]


def _too_large(case: Case) -> Measured | None:
    """The original where this machine has not the memory for it: predicted, not run."""
    plain, free = memfit.profile(simulated(case), simulate=True), psutil.virtual_memory().available
    if plain.process_high_bytes < free:
        return None
    why = f"not run: {format_bytes(plain.process_bytes)} predicted for the process, {format_bytes(free)} free here"
    return Measured("original", peak_bytes=plain.peak_bytes, refused=why)


def _measured_row(case: Case, result: Measured, found: Sequence[Measured]) -> list[str]:
    if result.refused:
        return [case.name, result.name, result.refused, "", "", ""]
    seconds = next(other.seconds for other in found if not other.refused)
    process, slower = format_bytes(result.process_bytes), f"{result.seconds / seconds:.2f}"
    return [case.name, result.name, *_saved(result.peak_bytes, found[0].peak_bytes), process, slower]


def _saved(peak: int, original: int) -> list[str]:
    return [format_bytes(peak), f"{1 - peak / original:.1%}" if peak != original else ""]


def eight_row(size: int) -> list[str]:
    """Eight images a chunk of one at a time beside one image, both predicted."""
    one, eight = simulated(Case(size, 1, ())), simulated(Case(size, 8, ()))
    option = LEVERS["chunk"].options(memfit.profile(eight, simulate=True))[-1]
    with LEVERS["chunk"].apply(eight, option):
        chunked = memfit.profile(eight, simulate=True).peak_bytes
    single = memfit.profile(one, simulate=True).peak_bytes
    return [f"{size}²", format_bytes(single), format_bytes(chunked), f"{chunked / single:.3f}"]


def largest() -> None:
    """Images of 512² on a card of 24 GiB."""
    forms = {"original": partial(make_original, 512, 4), HAND_FIX: partial(make_original, 512, 4, hand_fix=True)}
    write_largest(README, "24GiB", forms, "cuda")


def gradient_rows(case: Case) -> list[list[str]]:
    """How far llm2vae's gradients are from the original's, really run, for each way."""
    expected = _gradient(make_original(case.image_size, case.batch_size))
    rows = [[HAND_FIX, _distance(_gradient(make_original(case.image_size, case.batch_size, hand_fix=True)), expected)]]
    ledger = memfit.profile(simulated(case), simulate=True)
    options = [*LEVERS["saved"].options(ledger), LEVERS["chunk"].options(ledger)[-1]]
    for option in options:
        step = make_step(case.image_size, case.batch_size)
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


def training_row(way: str, flags: list[str]) -> list[str]:
    """The recipe itself, trained on its own pictures: loss and PSNR after the first epoch, and after the last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("train.py")), *TRAINED, *flags, "--output-dir", folder]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    epochs = re.findall(r"pixel loss ([\d.]+) \| PSNR ([\d.]+) dB", told)
    return [way, *epochs[0], *epochs[-1]]


def training() -> None:
    """The same training, as it is documented and in memfit's."""
    rows = [training_row("original", ["--budget", "none"]), training_row(HAND_FIX, ["--budget", "none", "--hand-fix"])]
    rows.append(training_row(f"memfit, --budget {BUDGET}", ["--budget", BUDGET]))
    write_table(README, "training", ("way", "loss, epoch 1", "PSNR", f"loss, epoch {EPOCHS}", "PSNR"), rows)


def main() -> None:
    """All tables, the quick ones first."""
    write_table(
        README, "predicted", ("images", "way", "peak", "saved", "time"), [row for case in PREDICTED for row in predicted_rows(case)]
    )
    write_table(README, "eight", ("images", "one, original", "eight, one at a time", "ratio"), [eight_row(size) for size in EIGHT])
    largest()
    write_table(README, "gradients", ("way", "distance from the original's"), gradient_rows(COMPARED))
    training()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for case in MEASURED for row in measured_rows(case, Path(folder))]
    write_table(README, "measured", ("images", "way", "peak", "saved", "process", "CPU time"), rows)


if __name__ == "__main__":
    main()
