"""The documented size for real: `python recipes/radar_vae/full_size.py [--samples 2]` (half an hour on two idle cores, 12 GiB).

The standard type at the whole grid with a batch of 8 needs more than most machines have: its own memory is predicted. What is run is one
sample as it is, for the time per sample, and the batch of 8 fitted into a seventh and into a twelfth, each in a process of its own.
With `--samples` only so many of the 8 are run, one after the other as planned; the table says so. Both plans are proven on a corner of each
of the 8 volumes, where the original fits the same budget: the same operators and levers, what only shows at the whole size aside.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import torch

import memfit
from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.process import HighWaterMark
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_plan
from memfit.units import format_bytes
from recipes.kit.budget import levers_in_words, proof_in_words
from recipes.kit.measuring import apart
from recipes.kit.tables import write_table
from recipes.radar_vae.data import Grid
from recipes.radar_vae.model import GRID
from recipes.radar_vae.train_latent_diffusion import corner_of, make_documented_step, make_step

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"

HEADER = [
    "standard, whole grid",
    "process, predicted",
    "process, measured",
    "peak, measured",
    "CPU time per sample",
    "plan",
    "the same training?",
]


@dataclass(frozen=True)
class Ran:
    """One step, really run."""

    samples: int
    peak_bytes: int
    process_bytes: int
    seconds_per_sample: float  # CPU time


def ran(batch: int, samples: int, plan: memfit.Plan | None = None, grid: Grid = GRID) -> Ran:
    """A step that has its states, run once; to be called in a process of its own."""
    step = make_step("standard", batch, grid)
    _make_states(step)
    if plan is not None:
        apply_plan(step, plan)
    held = [*step.models["vae"].parameters(), *step.models["perceptual"].parameters(), step.batch]
    held += [t for state in step.optimizers[0].state.values() for t in state.values()]
    with HighWaterMark() as mark, MemoryEvents() as events:
        started = time.process_time()
        step.run(step.batch[:samples])
        seconds = time.process_time() - started
    peak = sum(t.untyped_storage().nbytes() for t in held) + peak_of([change for part in events.sections() for change in part])
    return Ran(samples, peak, mark.bytes, seconds / samples)


def _make_states(step: memfit.Step) -> None:
    """The optimizer's states exist from the second step on: an update of nothing makes them without a first one."""
    for p in step.models["vae"].parameters():
        p.grad = torch.zeros_like(p)
    step.optimizers[0].step()
    step.optimizers[0].zero_grad()


def proven(plan: memfit.Plan, grid: Grid = GRID) -> str:
    """The verdict on the plan, from a corner of each sample and inside the plan's budget; to be called in a process of its own."""
    step = make_step("standard", 8, grid)
    corner = corner_of(step.batch)
    verdict = memfit.verify(step, plan, limit_bytes=plan.budget_bytes, smaller_batch=corner)
    where = f" on corners of {'×'.join(map(str, corner.shape[2:]))}" if any("smaller batch" in note for note in verdict.notes) else ""
    return proof_in_words(verdict) + where


def main() -> None:
    """Predict, plan, run, write."""
    parser = argparse.ArgumentParser(description="Run the documented size, fitted.")
    parser.add_argument("--samples", type=int, default=8, choices=range(1, 9), help="how many of the batch's 8 samples are run")
    samples = parser.parse_args().samples
    documented = built_without_memory(make_documented_step)
    plain = memfit.profile(documented, simulate=True)
    plans = [memfit.plan(documented, plain.process_bytes // share) for share in (7, 12)]
    one = apart(ran, 1, 1)
    found = [apart(ran, 8, samples, plan) for plan in plans]
    write_table(RESULTS, "full", HEADER, rows_of(plain, plans, one, found, [apart(proven, plan) for plan in plans]))


def rows_of(plain: memfit.Ledger, plans: list[memfit.Plan], one: Ran, found: list[Ran], verdicts: list[str]) -> list[list[str]]:
    """Predicted and measured in columns of their own."""
    rows = [
        ["original, batch 8", format_bytes(plain.process_bytes), "", "", "", "", ""],
        ["original, batch 1", "", *_cells(one, plain, one), "", ""],
    ]
    for plan, fitted, verdict in zip(plans, found, verdicts, strict=True):
        run = "" if fitted.samples == 8 else f", {fitted.samples} of its samples run"
        share = f"memfit, batch 8{run}, budget {format_bytes(plan.budget_bytes)}"
        rows.append([share, format_bytes(plan.predicted_process_bytes), *_cells(fitted, plain, one), levers_in_words(plan), verdict])
    return rows


def _cells(ran: Ran, plain: memfit.Ledger, one: Ran) -> list[str]:
    process = f"{format_bytes(ran.process_bytes)} (1/{plain.process_bytes / ran.process_bytes:.1f})"
    return [process, format_bytes(ran.peak_bytes), f"{ran.seconds_per_sample / one.seconds_per_sample:.2f}"]


if __name__ == "__main__":
    main()
