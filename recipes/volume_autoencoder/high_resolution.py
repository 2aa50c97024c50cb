"""python recipes/volume_autoencoder/high_resolution.py --data-dir DIR

Trains one epoch at 256×256×64 inside 4 GiB, as a user would, and writes what it took into README.md (with one volume in DIR: about twenty
minutes on two cores). Then asks for the least that [32, 64, 64] can be brought down to.
"""

from __future__ import annotations

import argparse
import csv
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # so that the recipe finds its neighbours from any directory

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.kit.tables import write_table
from recipes.volume_autoencoder.data import sources_in
from recipes.volume_autoencoder.train_autoencoder import step_of

BUDGET = "4GiB"


def main() -> None:
    """Both rows of the table."""
    parser = argparse.ArgumentParser(description="Train at 256×256×64 inside 4 GiB.")
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with one real volume, or a few")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/high_resolution"))
    args = parser.parse_args()
    rows = [("[16, 32, 64], --budget 4GiB", *trained(args))]
    rows.append(("[32, 64, 64], the lowest", f"{lowest_of((32, 64, 64))} (upper end)", "not run", "", ""))
    header = (
        "channels",
        "process predicted",
        "measured while training",
        "whole run, with proof and picture",
        "seconds a step",
    )
    write_table(HERE / "README.md", "high", header, rows)


def trained(args: argparse.Namespace) -> tuple[str, str, str, str]:
    """What the run said it would take, took while training, took at all, and its time."""
    command = [sys.executable, str(HERE / "train_autoencoder.py"), "--config", str(HERE / "configs" / "exact_4gib.yaml")]
    command += ["--data-dir", str(args.data_dir), "--output-dir", str(args.output_dir), "--budget", BUDGET, "--epochs", "1"]
    started = time.perf_counter()
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(ran.stdout, f"{time.perf_counter() - started:.0f} s in all", flush=True)
    (row,) = csv.DictReader((args.output_dir / "log.csv").open())
    predicted = re.search(r"→\s+([\d.]+\s+\w+)\s+predicted", ran.stdout)
    whole = format_bytes(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    return (
        predicted[1] if predicted else "",
        format_bytes(int(row["memory_bytes"])),
        whole,
        seconds_a_step(float(row["seconds"]), args.data_dir),
    )


def seconds_a_step(seconds: float, data_dir: Path) -> str:
    """Of an epoch's: each volume is a step, and what else lies in the folder is none."""
    return f"{seconds / len(sources_in(data_dir)):.0f}"


def lowest_of(channels: tuple[int, ...]) -> str:
    """The lowest that exact techniques reach, predicted; nothing is run."""
    step = built_without_memory(lambda: step_of("exact_4gib", num_channels=channels))
    try:
        memfit.plan(step, "1GiB", progress=lambda words: print(words, flush=True))
    except memfit.Infeasible as no:
        return format_bytes(no.lowest_bytes)
    raise SystemExit("It fits 1 GiB: nothing to tell.")


if __name__ == "__main__":
    main()
