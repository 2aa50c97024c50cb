"""Measure what the README says, and write it again: what memfit finds and plans, and the main table. Then RESULTS.md, by results.py.

    python recipes/conditional_unet/table.py [--data-dir CIFAR] [--main]

Without --data-dir the equal trainings are on shapes drawn here. --main leaves RESULTS.md as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere: recipes are not installed

import torch

import memfit
from memfit.capture.process import HighWaterMark
from memfit.capture.simulation import built_without_memory
from memfit.capture.unwatched import peak_of_a_step
from memfit.fitting.applying import apply_plan
from memfit.fitting.largest_batch import largest_batch
from memfit.levers import LEVERS
from memfit.units import format_bytes, parse_bytes
from recipes.conditional_unet import results
from recipes.conditional_unet.data import load, synthetic
from recipes.conditional_unet.diffusion import validation_loss
from recipes.conditional_unet.forms import FORMS, looks_at_values
from recipes.conditional_unet.steps import GUIDED_DIFFUSION, step_of
from recipes.kit.largest import in_words
from recipes.kit.measuring import Measured, Way, apart, measure
from recipes.kit.tables import write_block, write_table
from recipes.kit.told import findings, techniques, told

README, TRAIN = (Path(__file__).with_name(name) for name in ("README.md", "train.py"))
STEP = "recipes.conditional_unet.steps:step_of"
BATCH, BUDGET, TIGHT = 4, "900MiB", "850MiB"
CPU, GPU = "1.5GiB", "24GiB"
SMALL: dict[str, Any] = {"image_size": 16, "model_channels": 32, "attention_resolutions": (8,)}
UPDATES, TRAINED_BATCH, THRESHOLD = 40, 32, 0.1


def main() -> None:
    """The README; then, if it is not left out, RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10: an npz, the archive or its folder")
    parser.add_argument("--main", action="store_true", help="only what is in the README")
    args = parser.parse_args()
    write_block(README, "finding", findings(told(TRAIN, "profile", "--simulate"), "attention", "outer_product"))
    write_block(README, "plan", techniques(told(TRAIN, "plan", "--budget", BUDGET)))
    main_table(args.data_dir)
    if not args.main:
        results.write_all(args.data_dir)


def ways() -> list[Way]:
    """The original, each documented method, all of them, the factored condition, memfit."""
    here = {"samples": BATCH}
    return [
        *(Way(name, STEP, here | form) for name, form in FORMS.items()),
        Way(f"memfit, exact, {BUDGET}", STEP, here, BUDGET),
        Way(f"memfit, exact, {TIGHT}", STEP, here, TIGHT),
        Way(f"memfit, rounding allowed, {BUDGET}", STEP, here, BUDGET, "rounded"),
    ]


def main_table(data: Path | None) -> None:
    """Every way: its memory and time, the largest batches that it is predicted to reach, and what equal training comes to."""
    found = measure([way for way in ways() if not once(way)], rounds=3)
    cells = measured(found) | measured_once([way for way in ways() if once(way)])
    rows = [[way.name, *cells[way.name], *apart(predicted, way), apart(trained, way, data)] for way in ways()]
    header = ["", f"peak, batch {BATCH}", "process", "CPU time", f"largest batch in {CPU}, predicted for CPU"]
    header += [f"in {GPU} of a GPU, predicted", f"validation loss after {UPDATES} equal updates"]
    write_table(README, "main", header, rows)
    plans = [[r.name, r.plan or r.refused.splitlines()[0], r.verdict] for r in found if r.plan or r.refused]
    write_table(results.RESULTS, "plans", ["", "what memfit did", "verdict"], plans)


def once(way: Way) -> bool:
    """float16 on a CPU takes a minute a step; low_rank has one step only: the SVD of what its weights have become does not converge."""
    config = way.settings.get("optimization", {})
    return bool(config.get("use_fp16") or config.get("optimization_method") == "low_rank")


def measured(found: list[Measured]) -> dict[str, list[str]]:
    """Peak, process, time."""
    original, cells = found[0], {}
    for it in found:
        share, slower = it.peak_bytes / original.peak_bytes, it.seconds / original.seconds
        told = [f"{format_bytes(it.peak_bytes)} ({share:.2f})", format_bytes(it.process_bytes), f"{slower:.2f}"]
        cells[it.name] = ["does not fit", "", ""] if it.refused else told
    return cells


def measured_once(several: list[Way]) -> dict[str, list[str]]:
    """The same of the first step alone, against the original's: no optimizer has states in it yet."""
    original, cells = apart(first_step, {"samples": BATCH}), {}
    for way in several:
        print(f"{way.name}: one step", flush=True)
        peak, process, seconds = apart(first_step, way.settings)
        share, slower = peak / original[0], seconds / original[2]
        cells[way.name] = [f"first step: {format_bytes(peak)} ({share:.2f})", format_bytes(process), f"{slower:.2f}"]
    return cells


def first_step(settings: dict[str, Any]) -> tuple[int, int, float]:
    """Peak, process and CPU seconds."""
    step = step_of(**settings)
    with HighWaterMark() as mark:
        started = time.process_time()
        peak = peak_of_a_step(step)
        seconds = time.process_time() - started
    return peak, mark.bytes, seconds


def predicted(way: Way) -> list[str]:
    """The largest batches; the upper end of the interval counts. The CPU's first: simulating enlarges this process."""
    return [largest(way, CPU, "cpu"), largest(way, GPU, "cuda")]


def largest(way: Way, budget: str, device: str) -> str:
    """`conditional` looks at values, which a simulation has none of: it is asked as `chunked`."""
    print(f"{way.name}: the largest batch in {budget}, predicted for {device}", flush=True)
    form = {name: value for name, value in way.settings.items() if name != "samples"}
    if looks_at_values(form):
        form = {"optimization": form["optimization"] | {"optimization_method": "chunked"}}
    sizes: dict[str, Any] = {"samples": 32, **GUIDED_DIFFUSION} if device == "cuda" else {"samples": 2 * BATCH}
    step = built_without_memory(lambda: step_of(**sizes, **form))
    fitted = way.budget is not None
    found = largest_batch(step, parse_bytes(budget), device=device, allow=way.allow, levers=LEVERS if fitted else {})
    whole, parts = in_words(found.without_microbatch, found), in_words(found.with_microbatch, found)
    return f"{whole} whole, {parts} in parts" if fitted else in_words(found.plain, found)


def trained(way: Way, data: Path | None) -> str:
    """The validation loss of a small model: the same weights, pictures, times, noise and dropped classes for every way."""
    print(f"{way.name}: training", flush=True)
    images = load(data, SMALL["image_size"]) if data else synthetic(4000, SMALL["image_size"])
    step = step_of(**way.settings | SMALL | {"samples": TRAINED_BATCH})
    if way.budget:
        tight = memfit.profile(step, simulate=True)
        budget = tight.process_high_bytes - tight.peak_bytes // 4
        try:
            apply_plan(step, memfit.plan(step, budget, allow=way.allow))
        except memfit.Infeasible:
            return "does not fit"
    torch.manual_seed(1)
    order = torch.randperm(images.training)[: UPDATES * TRAINED_BATCH]
    try:
        for batch in images.batches(TRAINED_BATCH, order):
            step.run(batch)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return "NaN"
    skipped = step.running.guard.state_dict()["skipped"] if step.running.guard else 0
    told = f"{validation_loss(step.models[''], images, TRAINED_BATCH, THRESHOLD):.5f}"
    return told + (f", {skipped} updates skipped as NaN" if skipped else "")


if __name__ == "__main__":
    main()
