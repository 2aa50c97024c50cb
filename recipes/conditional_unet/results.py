"""The tables of RESULTS.md: exactness, kernels, the same memory, batch sizes, a GPU's sizes, two epochs on real pictures."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.conditional_unet.conditioning import PRESETS, OptimizationConfig
from recipes.conditional_unet.exactness import MODES, difference
from recipes.conditional_unet.forms import BEFORE, FORMS, ORIGINAL, looks_at_values, method
from recipes.conditional_unet.steps import GUIDED_DIFFUSION, get_optimal_batch_size, step_of
from recipes.kit.measuring import Way, measure
from recipes.kit.tables import write_table

RESULTS = Path(__file__).with_name("RESULTS.md")
STEP = "recipes.conditional_unet.steps:step_of"
BATCH, SAME_MEMORY_BATCH = 4, 32
KERNELS: dict[str, dict[str, Any]] = {
    "maps written out": {},
    "torch's fused attention": {"kernel": "fused"},
    "chunks of 256 queries, the factored form's kernel": {"kernel": "chunks"},
}


def write_all(data: Path | None) -> None:
    """All of them, the quick ones first; without real pictures the table of two epochs stays as it is."""
    exactness_table()
    kernels_table()
    same_memory_table()
    batch_size_table()
    gpu_table()
    if data:
        training_table(data)


def exactness_table() -> None:
    """What each method changes."""
    rows = []
    for name in ("conditional", "low_rank", "chunked", "factored"):
        found = [difference(name, mode) for mode in MODES]
        rows.append([f"`{name}`", *(f"{_small(d.output)} / {_small(d.gradients)}" for d in found)])
    write_table(RESULTS, "exactness", ["method", *(f"{mode}: output / gradients" for mode in MODES)], rows)


def _small(error: float) -> str:
    return "NaN" if math.isnan(error) else "0" if error == 0 else f"{error:.0e}" if error < 1e-3 else f"{error:.2f}"


def kernels_table() -> None:
    """Factored against c⊗c written out with every kernel, its own one included; all in one process, in turns."""
    steps = {name: step_of(BATCH, **form) for name, form in (KERNELS | {"factored": method("factored")}).items()}
    fastest = dict.fromkeys(steps, (math.inf, math.inf))
    for _ in range(5):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            step.run(step.batch)
            spent = time.process_time() - cpu, time.perf_counter() - wall
            fastest[name] = min(fastest[name][0], spent[0]), min(fastest[name][1], spent[1])
    ours = fastest.pop("factored")
    rows = [[name, f"{ours[0] / cpu:.2f}", f"{ours[1] / wall:.2f}"] for name, (cpu, wall) in fastest.items()]
    write_table(RESULTS, "kernels", ["c⊗c written out, with", "factored takes of its CPU time", "of its wall time"], rows)


def same_memory_table() -> None:
    """The memory of the model before the fix at batch 32: how many samples of each form it holds, and what these really take."""
    forms: dict[str, dict[str, Any]] = {
        "before the fix, fused attention": BEFORE | {"kernel": "fused"},
        "the original": {},
        "the original, fused attention": {"kernel": "fused"},
        "factored": method("factored"),
    }
    limit = predicted(SAME_MEMORY_BATCH, **forms["before the fix, fused attention"])
    sizes = {name: largest_in(limit, **form) for name, form in forms.items()}
    found = measure([Way(name, STEP, {"samples": sizes[name], **form}) for name, form in forms.items()], rounds=0)
    rows = [[r.name, str(sizes[r.name]), f"{sizes[r.name] / SAME_MEMORY_BATCH:.2f}", format_bytes(r.peak_bytes)] for r in found]
    write_table(RESULTS, "same memory", ["form", f"largest batch in {format_bytes(limit)}, predicted", "of 32", "peak, measured"], rows)


def largest_in(limit: int, **settings: Any) -> int:
    """By growth between two sizes; what is measured at the result shows whether it holds."""
    low, high = predicted(16, **settings), predicted(32, **settings)
    return 32 + math.floor((limit - high) / ((high - low) / 16))


def predicted(samples: int, device: str = "cpu", **settings: Any) -> int:
    """The peak, simulated."""
    step = built_without_memory(lambda: step_of(samples, **settings))
    return memfit.profile(step, simulate=True, device=device).peak_bytes


def batch_size_table() -> None:
    """get_optimal_batch_size, and the process at that batch."""
    rows = []
    for name in ("none", "factored"):
        size = get_optimal_batch_size("1.5GiB", config=OptimizationConfig.of(PRESETS[name]))
        (real,) = measure([Way(name, STEP, {"samples": size, "optimization": PRESETS[name]})], rounds=2)
        rows.append(["1.5 GiB", f"`{name}`", "32", str(size), format_bytes(real.process_bytes)])
    header = ["available", "preset", "documented formula", "get_optimal_batch_size, predicted", "process at that batch, measured"]
    write_table(RESULTS, "batch size", header, rows)


def gpu_table() -> None:
    """Simulated for a GPU: batch 32, and what each further sample takes."""
    forms = {name: form for name, form in FORMS.items() if not looks_at_values(form)}
    forms |= {
        "the original, fused attention": {"kernel": "fused"},
        "before the fix, fused attention": {"cemb_mm": False, "kernel": "fused"},
        "factored + use_fp16 + checkpoint": method("factored", use_fp16=True, use_checkpoint=True),
    }
    rows, original = [], 0
    for name, form in sorted(forms.items(), key=lambda item: item[0] != ORIGINAL):
        print(f"simulating {name}")
        half, whole = (predicted(n, "cuda", **GUIDED_DIFFUSION, **form) for n in (16, 32))
        original = original or whole
        each = (whole - half) / 16
        fits = 32 + int((24 * 2**30 - whole) / each)
        rows.append([name, format_bytes(whole), f"{whole / original:.2f}", format_bytes(int(each)), str(fits)])
    write_table(RESULTS, "gpu", ["form", "peak at batch 32", "of the original", "each further sample", "batch whose peak is 24 GiB"], rows)


def training_table(data: Path) -> None:
    """Equal training on real pictures: the same seed, batches and draws."""
    flags = ["--model-channels", "32", "--image-size", "16", "--epochs", "2", "--batch-size", "64", "--data-dir", str(data)]
    ways = {"the original": ["--sample-steps", "0"], "factored": ["--preset", "factored", "--sample-steps", "0"]}
    rows, seconds = [], 0.0
    for name, more in ways.items():
        log = list(_trained([*flags, *more]))
        seconds = seconds or float(log[-1]["seconds"])
        losses = [f"{float(row[key]):.5f}" for row in log for key in ("loss", "validation")]
        rows.append([name, *losses, f"{float(log[-1]['seconds']) / seconds:.2f}"])
    header = ["form", "loss, epoch 1", "validation", "loss, epoch 2", "validation", "time of an epoch"]
    write_table(RESULTS, "training", header, rows)


def _trained(flags: list[str]) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("train.py")), *flags, "--output-dir", folder]
        subprocess.run(command, check=True)
        with (Path(folder) / "log.csv").open() as file:
            yield from csv.DictReader(file)
