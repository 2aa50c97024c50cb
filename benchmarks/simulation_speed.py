"""How long memfit's simulated capture takes beside torch's own MemTracker on fake tensors: `python benchmarks/simulation_speed.py [ROW…]`.

Both follow one full step of the same model without touching memory. CPU time, the least of several turns, taken alternately after a
first one that fills the caches (memfit's measured workspaces, torch's fake kernels). Exits with 1 if a ratio is above the bound.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from memfit.capture import capture
from memfit.capture.simulation import built_without_memory
from zoo import make_step

_ROWS = ("monai_kl3d-b1-adamw-fp32", "resnet-b16-momentum-fp32", "gpt2-b4-adamw_foreach-fp32-drop", "bert-b4-adamw_foreach-bf16")
_TURNS = 3
_BOUND = 0.5


def _memfit(row: str) -> Callable[[], None]:
    step = built_without_memory(partial(make_step, row))

    def turn() -> None:
        capture(step, simulate=True)

    return turn


def _mem_tracker(row: str) -> Callable[[], None]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        step = make_step(row)

    def turn() -> None:
        tracker = MemTracker()
        tracker.track_external(*step.models.values(), *step.optimizers)
        with mode, tracker:
            step.run(step.batch)

    return turn


def _cpu_seconds(turn: Callable[[], None]) -> tuple[float, float]:
    """What this process spent, and what processes that it started spent."""
    own, others = time.process_time(), _of_children()
    turn()
    return time.process_time() - own, _of_children() - others


def _of_children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def _compare(row: str) -> tuple[float, float, float]:
    """memfit's seconds, the seconds of processes it starts, and MemTracker's."""
    turns = _memfit(row), _mem_tracker(row)
    for turn in turns:
        turn()
    taken = [[_cpu_seconds(turn) for turn in turns] for _ in range(_TURNS)]
    ours, theirs = ([turn[i] for turn in taken] for i in (0, 1))
    return min(own for own, _ in ours), min(others for _, others in ours), min(own for own, _ in theirs)


def main(rows: tuple[str, ...]) -> int:
    """Print the table; 1 if memfit is too slow anywhere."""
    table = Table("row", "memfit", "its children", "MemTracker", "ratio", "with children", title="CPU seconds for one simulated step")
    ratios = []
    for row in rows:
        own, children, theirs = _compare(row)
        ratios.append(own / theirs)
        table.add_row(row, f"{own:.2f}", f"{children:.2f}", f"{theirs:.2f}", f"{own / theirs:.2f}", f"{(own + children) / theirs:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table, f"bound: {_BOUND} of MemTracker's time; worst: {max(ratios):.2f}")
    return int(max(ratios) > _BOUND)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or _ROWS))
