"""Measure what the README says, and write it again: what memfit finds and plans, and the main table. Then RESULTS.md, by results.py.

    python recipes/cifar10/table.py [--data-dir DIR] [--main]

Without --data-dir the equal trainings are on pictures made here. --main leaves RESULTS.md as it is.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import memfit
from memfit.capture.loaders import loader_workers
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_plan
from memfit.fitting.largest_batch import largest_batch
from memfit.levers import LEVERS
from memfit.units import format_bytes, parse_bytes
from recipes.cifar10 import data, results
from recipes.cifar10.curves import BATCH, MICRO, make_documented_step
from recipes.cifar10.train import make_step
from recipes.cifar10.training import test
from recipes.kit.largest import in_words
from recipes.kit.measuring import Measured, Way, apart, measure
from recipes.kit.tables import write_block, write_table
from recipes.kit.told import findings, techniques, told

README, TRAIN = (Path(__file__).with_name(name) for name in ("README.md", "train.py"))
NAME, PLAIN, DOCUMENTED = "h2q", "recipes.cifar10.train:make_step", "recipes.cifar10.curves:make_documented_step"
BUDGET, TIGHT = "900MiB", "800MiB"
CPU, LAPTOP = "1.1GB", "16GB"  # what the document says the original took, and the machine it was for
PICTURES = 2560  # of the equal trainings: 20 updates of 128
ORIGINAL = "the original: 128 at once"


def main() -> None:
    """The README; then, if it is not left out, RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies, as downloaded or as npz")
    parser.add_argument("--main", action="store_true", help="only what is in the README")
    args = parser.parse_args()
    write_block(README, "finding", findings(told(TRAIN, "profile", "--simulate"), "microbatch", "allocator"))
    write_block(README, "plan", techniques(told(TRAIN, "plan", "--budget", BUDGET)))
    main_table(args.data_dir)
    if not args.main:
        results.write_all(args.data_dir)


def ways() -> list[Way]:
    """The original, each documented fix, all of them, memfit."""
    here = {"name": NAME}
    return [
        Way(ORIGINAL, PLAIN, here),
        Way("documented: batches of 16, another training", PLAIN, here | {"batch": MICRO}),
        Way("documented, together: 16 × 8", DOCUMENTED, here),
        Way(f"memfit, exact, {BUDGET}", PLAIN, here, BUDGET),
        Way(f"memfit, exact, {TIGHT}", PLAIN, here, TIGHT),
        Way(f"memfit, rounding allowed, {BUDGET}", PLAIN, here, BUDGET, "rounded"),
    ]


def main_table(directory: Path | None) -> None:
    """Every way: its memory and time, the largest batches that it is predicted to reach, and what equal training comes to."""
    found = measure(ways(), rounds=3)
    rows = [
        [way.name, *measured(it, found[0]), *apart(predicted, way), apart(trained, way, directory)]
        for way, it in zip(ways(), found, strict=True)
    ]
    two = loader_workers(data.train_loader(data.load(directory) if directory else data.synthetic(), BATCH, 2))
    no_workers = ["documented: no workers", *rows[0][1:]]
    rows[0][2] += f" and {format_bytes(two.bytes)} for two workers"
    rows.insert(1, no_workers)
    header = [NAME, "peak", "process", "CPU time a picture", f"largest batch in {CPU}, predicted for CPU"]
    header += [f"in {LAPTOP}, predicted for MPS", f"test loss after {PICTURES:,} pictures"]
    write_table(README, "main", header, rows)
    plans = [[it.name, it.plan or it.refused.splitlines()[0], it.verdict] for it in found if it.plan or it.refused]
    write_table(results.RESULTS, "plans", ["", "what memfit did", "verdict"], plans)


def measured(it: Measured, original: Measured) -> list[str]:
    """Peak, process, time."""
    if it.refused:
        return ["does not fit", "", ""]
    pictures = BATCH / MICRO if "batches of 16" in it.name else 1.0
    share, slower = it.peak_bytes / original.peak_bytes, it.seconds * pictures / original.seconds
    return [f"{format_bytes(it.peak_bytes)} ({share:.2f})", format_bytes(it.process_bytes), f"{slower:.2f}"]


def predicted(way: Way) -> list[str]:
    """The largest batches; the upper end of the interval counts. The CPU's first: simulating enlarges this process."""
    return [largest(way, CPU, "cpu"), largest(way, LAPTOP, "mps")]


def largest(way: Way, budget: str, device: str) -> str:
    """What a way is called with that is not its batch stays."""
    print(f"{way.name}: the largest batch in {budget}, predicted for {device}", flush=True)
    settings = {name: value for name, value in way.settings.items() if name != "batch"}
    step = built_without_memory(lambda: (make_step if way.make == PLAIN else make_documented_step)(**settings))
    fitted = way.budget is not None
    found = largest_batch(step, parse_bytes(budget), device=device, allow=way.allow, levers=LEVERS if fitted else {})
    whole, parts = in_words(found.without_microbatch, found), in_words(found.with_microbatch, found)
    return f"{whole} whole, {parts} in parts" if fitted else in_words(found.plain, found)


def trained(way: Way, directory: Path | None) -> str:
    """The test loss after a short training: the same weights, and the same pictures in the same order, for every way."""
    print(f"{way.name}: training", flush=True)
    step = (make_step if way.make == PLAIN else make_documented_step)(**way.settings)
    if way.budget:
        try:
            apply_plan(step, memfit.plan(step, way.budget, allow=way.allow))
        except memfit.Infeasible:
            return "does not fit"
    images = data.load(directory) if directory else data.synthetic(PICTURES, 1000)
    loader = data.train_loader(images, step.batch_size)
    data.begin_epoch(loader, 0)
    for batch in islice(loader, PICTURES // step.batch_size):
        step.run(batch)
    return f"{test(step.models[''], images)[1]:.5f}"


if __name__ == "__main__":
    main()
