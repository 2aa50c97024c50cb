"""The tables of RESULTS.md: the plain network, loss curves, workers, cleaning up, other devices, a run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

import memfit
from memfit.capture.loaders import loader_workers
from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.process import HighWaterMark
from memfit.capture.simulation import built_without_memory
from memfit.units import format_bytes
from recipes.cifar10 import data
from recipes.cifar10.curves import BATCH, INTO_THE_SECOND, MICRO, STEPS, Curve, curve, make_documented_step
from recipes.cifar10.train import make_step
from recipes.cifar10.training import documented_epoch
from recipes.kit.measuring import Measured, Way, apart, measure
from recipes.kit.tables import write_block, write_table

RESULTS = Path(__file__).with_name("RESULTS.md")
BUDGETS = {"h2q": "1000MiB", "baseline": "600MiB"}
TIGHT = {"h2q": "750MiB", "baseline": "530MiB"}  # about the lowest that memfit reaches


def write_all(directory: Path | None) -> None:
    """All of them; without real pictures only those that need none, and the others stay as they are."""
    predictions()
    memory("baseline")
    if directory:
        workers(directory)
        cleaning(directory)
        for name in BUDGETS:
            curves(name, directory)
        final_run(directory)


def memory(name: str) -> None:
    """One update of 128 pictures: as it was, as documented, and as memfit has it."""
    here, budget = "recipes.cifar10.train:make_step", BUDGETS[name]
    ways = [
        Way("original: 128 at once", here, {"name": name}),
        Way("batch 16, another training", here, {"name": name, "batch": MICRO}),
        Way("documented: 16 × 8", "recipes.cifar10.curves:make_documented_step", {"name": name}),
        Way(f"memfit, exact, {budget}", here, {"name": name}, budget),
        Way(f"memfit, exact, {TIGHT[name]}", here, {"name": name}, TIGHT[name]),
        Way(f"memfit, rounding allowed, {budget}", here, {"name": name}, budget, "rounded"),
    ]
    found = measure(ways, rounds=3)
    header = [name, "peak", "process", "CPU time a picture", "what memfit did", "verdict"]
    write_table(RESULTS, f"memory {name}", header, [_row(one, found[0]) for one in found])


def _row(one: Measured, original: Measured) -> list[str]:
    if one.refused:
        return [one.name, "does not fit", "", "", one.refused.splitlines()[0], ""]
    pictures = BATCH / MICRO if one.name.startswith("batch 16") else 1.0
    slower = f"{one.seconds * pictures / original.seconds:.2f}"
    return [one.name, format_bytes(one.peak_bytes), format_bytes(one.process_bytes), slower, one.plan, one.verdict]


def curves(name: str, directory: Path) -> None:
    """Each way's curve against the original's."""
    ways = {
        "original": "original: 128 at once",
        "backwards": "the same, each batch back to front",
        "memfit": f"memfit, micro-batches only, {BUDGETS[name]}",
    }
    found = {way: apart(curve, name, way, BUDGETS[name], directory) for way in (*ways, "documented")}
    words = ways | {"documented": "documented: 16 × 8"}
    header = [
        name,
        "updates, pictures used in an epoch",
        "off in the first 20 updates",
        "in the epoch",
        "in 10 of the next",
        "test accuracy, loss",
    ]
    rows = [
        [words[way], f"{len(it.losses) - INTO_THE_SECOND}, {it.used:,}", *_distances(it, found["original"]), _test(it)]
        for way, it in found.items()
    ]
    write_table(RESULTS, f"curve {name}", header, rows)


def _distances(one: Curve, original: Curve) -> list[str]:
    """The largest difference of losses; in the second epoch the updates with the same pictures are compared."""
    if one is original:
        return ["", "", ""]
    first = [abs(a - b) for a, b in zip(one.losses[:-INTO_THE_SECOND], original.losses[:-INTO_THE_SECOND], strict=False)]
    second = [abs(a - b) for a, b in zip(one.losses[-INTO_THE_SECOND:], original.losses[-INTO_THE_SECOND:], strict=True)]
    return [f"{max(first[:20]):.1e}", f"{max(first):.1e}", f"{max(second):.1e}"]


def _test(one: Curve) -> str:
    return f"{one.accuracy:.2%}, {one.test_loss:.4f}"


def workers(directory: Path) -> None:
    """What two workers add to the process tree, started in both ways that platforms have."""
    rows, images = [], data.load(directory)
    for context, where in (("fork", "fork, Linux's way"), ("spawn", "spawn, the way of macOS")):
        for batch in (BATCH, MICRO):
            loader = data.train_loader(images, batch, 2)
            loader.multiprocessing_context = context
            found = loader_workers(loader)
            rows.append([where, str(batch), format_bytes(found.bytes), format_bytes(found.waiting_bytes)])
    write_table(RESULTS, "workers", ["two workers", "batch", "add to the process tree", "of it batches that wait"], rows)


def cleaning(directory: Path) -> None:
    """`del` and emptying the cache, on and off: the documented loop over 104 micro-batches, then its peak over eight more."""
    rows = []
    for name in BUDGETS:
        for on in (False, True):
            print(f"{name}: the documented loop {'with' if on else 'without'} cleaning up")
            peak, process = apart(loop_memory, name, directory, on)
            rows.append([name, "with" if on else "without", format_bytes(peak), format_bytes(process)])
    write_table(RESULTS, "cleaning", ["documented loop", "`del` and emptying", "peak above what stays", "process"], rows)


def loop_memory(name: str, directory: Path, on: bool) -> tuple[int, int]:
    """The most that tensors took above those that stay, and the most the process held."""
    step, loader = make_step(name), data.train_loader(data.load(directory), MICRO)

    def some_of_an_epoch(count: int) -> None:
        documented_epoch(step.models[""], islice(loader, count), step.optimizers[0], STEPS, lambda number, loss: None, on)

    with HighWaterMark() as mark:
        some_of_an_epoch(104)
    with MemoryEvents() as events:
        events.marker()
        some_of_an_epoch(STEPS)
    return peak_of(events.sections()[-1]), mark.bytes


def predictions() -> None:
    """The same steps on the documented machine's kind of device, which was not here."""
    rows = []
    for name in BUDGETS:
        for words, make in (("128 at once", make_step), ("16 × 8", make_documented_step)):
            step = built_without_memory(partial(make, name))
            found = {device: memfit.profile(step, simulate=True, device=device) for device in ("cpu", "mps", "cuda")}
            rows.append([name, words, *(format_bytes(ledger.peak_bytes) for ledger in found.values())])
    write_table(RESULTS, "predicted", ["predicted peak", "", "CPU", "MPS", "CUDA"], rows)


def final_run(directory: Path) -> None:
    """Both models trained in the fitted form, and the end of what the program prints."""
    blocks = []
    with tempfile.TemporaryDirectory() as output:
        for name, budget in BUDGETS.items():
            flags = f"--epochs 2 --model {name} --budget {budget} --data-dir".split()
            command = [sys.executable, str(RESULTS.with_name("train.py")), *flags, str(directory), "--output-dir", output]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            blocks.append(f"$ python recipes/cifar10/train.py {' '.join(flags)} DIR\n" + _end_of(done.stdout))
    write_block(RESULTS, "run", "```\n" + "\n".join(blocks) + "```")


def _end_of(printed: str) -> str:
    """From memfit's line on; of lines written over themselves, the last."""
    lines = [line.rpartition("\r")[2] for line in printed.split("\n")]
    return "\n".join(lines[next(number for number, line in enumerate(lines) if line.startswith("memfit:")) :])
