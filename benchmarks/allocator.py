"""What the allocator lever's options hold and cost: `python benchmarks/allocator.py [ROW…]`; all rows write results/allocator.md.

One step of each model of the zoo, as it is and with each option, every one in a process of its own: the most the process held over twelve
steps by the kernel's mark, beside the interval predicted before; CPU time, the fastest of the twelve. Exits with 1 if a process held more
than the upper end of what was predicted for it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

import memfit
from memfit.capture.process import HighWaterMark
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_levers
from memfit.fitting.plan_rows import rows_of
from memfit.levers import LEVERS
from memfit.units import format_bytes
from zoo import ROWS, make_step

_STEPS = 12
_HEADER = ("step", "malloc", "process, predicted", "at most", "measured", "inside", "CPU time")
_RESULTS = Path(__file__).parent / "results" / "allocator.md"


@dataclass(frozen=True)
class Held:
    """What a process was predicted to hold, at most, and held; and the CPU seconds of its fastest step."""

    predicted: int
    most: int
    measured: int
    seconds: float


def held(row: str, number: int | None) -> tuple[str, Held]:
    """With an option of the lever, or with none."""
    plain = memfit.profile(built_without_memory(partial(make_step, row)), simulate=True)
    lever = LEVERS["allocator"]
    options = [] if number is None else [lever.options(plain)[number]]
    told = lever.rewrite(plain, options[0]) if options else plain
    step, fastest = make_step(row), float("inf")
    with apply_levers(step, rows_of(options)), HighWaterMark() as mark:
        for _ in range(_STEPS):
            started = time.process_time()
            step.run(step.batch)
            fastest = min(fastest, time.process_time() - started)
    return options[0].name if options else "as it is", Held(told.process_bytes, told.process_high_bytes, mark.bytes, fastest)


def cells(row: str) -> Iterator[tuple[tuple[str, ...], bool]]:
    """A line for each option, and whether the process stayed inside."""
    plain: Held | None = None
    for number in (None, 0, 1):  # the others are not weighed in plans
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            name, found = pool.submit(held, row, number).result()
        plain = plain or found
        sizes = map(format_bytes, (found.predicted, found.most, found.measured))
        inside = found.measured <= found.most
        yield (row, name, *sizes, "yes" if inside else "NO", f"{found.seconds / plain.seconds:.2f}"), inside


def main(rows: list[str]) -> int:
    """Print each line as it is found; 1 if a process held more than was promised."""
    console, lines, all_inside = Console(width=160), [], True
    for row in rows:
        for line, inside in cells(row):
            console.print(" | ".join(line), highlight=False)
            lines.append(line)
            all_inside &= inside
    if rows == all_rows():
        table = [f"| {' | '.join(cells)} |" for cells in (_HEADER, ["---"] * len(_HEADER), *lines)]
        _RESULTS.write_text("\n".join(["# What the process holds", "", *table]) + "\n")
    return int(not all_inside)


def all_rows() -> list[str]:
    """The first of each model."""
    return list({row.split("-")[0]: row for row in reversed(ROWS)}.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or all_rows()))
