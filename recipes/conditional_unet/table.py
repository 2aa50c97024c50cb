"""Measure what the README says, and write its tables again (a few minutes on two cores):

    python recipes/conditional_unet/table.py [--data-dir CIFAR]

Without --data-dir the table of trained models, which needs real pictures, stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere: recipes are not installed

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.conditional_unet.conditioning import PRESETS, OptimizationConfig
from recipes.conditional_unet.exactness import MODES, difference
from recipes.conditional_unet.steps import GUIDED_DIFFUSION, get_optimal_batch_size, step_of
from recipes.kit.measuring import Measured, Way, measure
from recipes.kit.tables import write_block, write_table

README = Path(__file__).with_name("README.md")
STEP = "recipes.conditional_unet.steps:step_of"
BATCH, SAME_MEMORY_BATCH = 4, 32
BUDGETS = {"900MiB": "reordered", "850MiB": "rounded"}


def method(name: str, **more: Any) -> dict[str, Any]:
    """Settings of a step with an optimization method."""
    return {"optimization": {"memory_optimization": True, "optimization_method": name, **more}}


CHECKPOINT = {"optimization": {"use_checkpoint": True}}
BEFORE: dict[str, Any] = {"cemb_mm": False}
FORMS: dict[str, dict[str, Any]] = {
    "before the fix: no cemb_mm": BEFORE,
    "the original": {},
    "documented: conditional": method("conditional"),
    "documented: low_rank 0.125": method("low_rank"),
    "documented: chunked 8": method("chunked"),
    "documented: use_checkpoint": CHECKPOINT,
    "documented, together (conditional + checkpoint)": method("conditional", use_checkpoint=True),
    "documented, together (low_rank + checkpoint)": method("low_rank", use_checkpoint=True),
    "factored": method("factored"),
    "factored + checkpoint": method("factored", use_checkpoint=True),
}
KERNELS: dict[str, dict[str, Any]] = {
    "maps written out": {},
    "torch's fused attention": {"kernel": "fused"},
    "chunks of 256 queries, the factored form's kernel": {"kernel": "chunks"},
}


def main() -> None:
    """All tables, the quick ones first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10: an npz, the archive or its folder")
    data = parser.parse_args().data_dir
    finding_block()
    exactness_table()
    kernels_table()
    forms_table()
    same_memory_table()
    memfit_table()
    batch_size_table()
    gpu_table()
    if data:
        training_table(data)


def finding_block() -> None:
    """What `memfit profile` says of the original, shortened to the condition and the maps."""
    command = [sys.executable, "-m", "memfit", "profile", f"{Path(__file__).with_name('train.py')}:make_step", "--simulate"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.split(r"\n(?= *[0-9.]+ [KMGT]?i?B  )", told.partition("What stands out")[2].partition("\n\n")[0])
    kept = [text.strip("\n") for text in found if "lever: outer_product" in text or "lever: attention" in text]
    write_block(README, "finding", "\n".join(["```", *kept, "```"]))


def exactness_table() -> None:
    """What each method changes."""
    rows = []
    for name in ("conditional", "low_rank", "chunked", "factored"):
        found = [difference(name, mode) for mode in MODES]
        rows.append([f"`{name}`", *(f"{_small(d.output)} / {_small(d.gradients)}" for d in found)])
    write_table(README, "exactness", ["method", *(f"{mode}: output / gradients" for mode in MODES)], rows)


def _small(error: float) -> str:
    return "NaN" if math.isnan(error) else "0" if error == 0 else f"{error:.0e}" if error < 1e-3 else f"{error:.2f}"


def predicted(samples: int, device: str = "cpu", **settings: Any) -> int:
    """The peak, simulated."""
    step = built_without_memory(lambda: step_of(samples, **settings))
    return memfit.profile(step, simulate=True, device=device).peak_bytes


def gpu_table() -> None:
    """Simulated for a GPU: batch 32, and what each further sample takes."""
    forms = {name: form for name, form in FORMS.items() if "conditional" not in name}  # looks at values: it cannot be simulated
    forms |= {
        "the original, fused attention": {"kernel": "fused"},
        "before the fix, fused attention": {"cemb_mm": False, "kernel": "fused"},
        "documented: use_fp16": {"optimization": {"use_fp16": True}},
        "documented: preset aggressive": {"optimization": PRESETS["aggressive"]},
        "factored + use_fp16 + checkpoint": method("factored", use_fp16=True, use_checkpoint=True),
    }
    rows, original = [], 0
    for name, form in sorted(forms.items(), key=lambda item: item[0] != "the original"):
        print(f"simulating {name}")
        half, whole = (predicted(n, "cuda", **GUIDED_DIFFUSION, **form) for n in (16, 32))
        original = original or whole
        each = (whole - half) / 16
        fits = 32 + int((24 * 2**30 - whole) / each)
        rows.append([name, format_bytes(whole), f"{whole / original:.2f}", format_bytes(int(each)), str(fits)])
    write_table(README, "gpu", ["form", "peak at batch 32", "of the original", "each further sample", "largest batch in 24 GiB"], rows)


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
    write_table(README, "same memory", ["form", f"largest batch in {format_bytes(limit)}, predicted", "of 32", "peak, measured"], rows)


def largest_in(limit: int, **settings: Any) -> int:
    """By growth between two sizes; what is measured at the result shows whether it holds."""
    low, high = predicted(16, **settings), predicted(32, **settings)
    return 32 + math.floor((limit - high) / ((high - low) / 16))


def batch_size_table() -> None:
    """get_optimal_batch_size, and the process at that batch."""
    rows = []
    for name in ("none", "factored"):
        size = get_optimal_batch_size("1.5GiB", config=OptimizationConfig.of(PRESETS[name]))
        (real,) = measure([Way(name, STEP, {"samples": size, "optimization": PRESETS[name]})], rounds=2)
        rows.append(["1.5 GiB", f"`{name}`", "32", str(size), format_bytes(real.process_bytes)])
    header = ["available", "preset", "documented formula", "get_optimal_batch_size, predicted", "process at that batch, measured"]
    write_table(README, "batch size", header, rows)


def forms_table() -> None:
    """Original, documented, factored."""
    found = measure([Way(name, STEP, {"samples": BATCH, **form}) for name, form in FORMS.items()], rounds=3)
    ended = ["NaN after one step, and no second one", "", ""]  # the SVD of what its weights have become does not converge
    rows = [[r.name, *ended] if r.refused and "low_rank" in r.name else _form_row(r, found[1])[:-1] for r in found]
    write_table(README, "forms", ["form", "peak", "process", "CPU time"], rows)


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
    write_table(README, "kernels", ["c⊗c written out, with", "factored takes of its CPU time", "of its wall time"], rows)


def memfit_table() -> None:
    """The original as memfit fits it."""
    ways = [Way("the original", STEP, {"samples": BATCH})]
    for budget, allow in BUDGETS.items():
        ways.append(Way(f"memfit, {allow} allowed, budget {budget}", STEP, {"samples": BATCH}, budget, allow))
    found = measure(ways, rounds=3)
    write_table(README, "memfit", ["form", "peak", "process", "CPU time", "plan"], [_form_row(r, found[0]) for r in found])


def _form_row(result: Measured, original: Measured) -> list[str]:
    if result.refused:
        return [result.name, "", "", "", result.refused.splitlines()[0]]
    share = f"{format_bytes(result.peak_bytes)} ({result.peak_bytes / original.peak_bytes:.2f})"
    told = f"{result.plan}; {result.verdict}" if result.plan else ""
    return [result.name, share, format_bytes(result.process_bytes), f"{result.seconds / original.seconds:.2f}", told]


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
    write_table(README, "training", header, rows)


def _trained(flags: list[str]) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("train.py")), *flags, "--output-dir", folder]
        subprocess.run(command, check=True)
        with (Path(folder) / "log.csv").open() as file:
            yield from csv.DictReader(file)


if __name__ == "__main__":
    main()
