"""How long planning takes: `python benchmarks/planning_speed.py [ROW…]`; results/planning.md is written when every row is run.

The five recipes' steps, one of each model of the accuracy table, and a deep transformer. Each step is built without memory and planned
for half of its peak above the fixed part. Timing ops comes first, once for this machine, and is not counted; then a second plan is: the
search alone, and all of it with its simulated captures. Seconds are CPU seconds, of this process and of those it starts, so that a busy
machine does not count. Exits with 1 if a bound is passed: 5 s for the search and 15 s for all of it, 30 s for a transformer of 48 layers
with more than 2,500 operators in forward.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.commands.target import load_step
from memfit.planner.proposing import Proposer
from zoo import ROWS, make_step

DEEP = "48 layers"
CASES = {
    "conditional_unet": "train.py",
    "radar_vae": "train_latent_diffusion.py",
    "pixel_loss": "train.py",
    "volume_autoencoder": "train_autoencoder.py",
    "cifar10": "train.py",
}
_ROOT = Path(__file__).parent.parent
_SHARE = 0.5
_TITLE = "CPU seconds for a plan at half of the peak"
_HEADER = ("step", "ops in forward", "search", "all", "the plan, by its predicted slowdown")
_BOUNDS, _DEEP_BOUNDS = (5.0, 15.0), (30.0, 30.0)  # of the search, and of all of it


def deep(layers: int = 48) -> Step:
    """A transformer with more than 2,500 operators in forward."""
    layer = nn.TransformerEncoderLayer(128, 8, 512, 0.1, batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    return Step(net, lambda model, x: model(x).pow(2).mean(), optimizer, torch.randn(32, 128, 128))


@dataclass
class Taken:
    """CPU seconds."""

    search: float = 0.0
    all: float = 0.0


def cpu_seconds() -> float:
    """Of this process and of those it has started."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@contextmanager
def searching_timed(taken: Taken) -> Iterator[None]:
    """Every search is counted while this is entered."""
    plain = {name: getattr(Proposer, name) for name in ("propose", "lowest", "bound")}

    def timed(name: str) -> Callable[..., object]:
        def search(*asked: object) -> object:
            started = cpu_seconds()
            try:
                return plain[name](*asked)
            finally:
                taken.search += cpu_seconds() - started

        return search

    for name in plain:
        setattr(Proposer, name, timed(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(Proposer, name, method)


def all_rows() -> list[str]:
    """The cases, one row of each model, and the deep one."""
    return [*CASES, *{row.split("-")[0]: row for row in reversed(ROWS)}.values(), DEEP]


def simulated_step(row: str) -> Step:
    """Of a case, of a row of the zoo, or the deep one; without memory."""
    if row in CASES:
        return load_step(f"{_ROOT / 'recipes' / row / CASES[row]}:make_step", simulate=True)
    return built_without_memory(deep if row == DEEP else partial(make_step, row))


def measured(step: Step) -> tuple[Taken, int, str]:
    """Seconds, operators in forward, and what came of it."""
    plain = memfit.profile(step, simulate=True)
    forward = sum(op.phase == "forward" for op in plain.trace.ops)
    budget = int(plain.process_high_bytes - (1 - _SHARE) * plain.peak_bytes)
    answer, taken = "", Taken()
    for _ in range(2):  # the first one fills the caches: workspaces and times of ops
        taken = Taken()
        started = cpu_seconds()
        try:
            with searching_timed(taken):
                plan = memfit.plan(step, budget)
            answer = f"{plan.predicted_slowdown:.2f} with {' + '.join(lever.name for lever in plan.levers)}, times {plan.times}"
        except memfit.Infeasible as no:
            answer = str(no).splitlines()[0]
        taken.all = cpu_seconds() - started
    return taken, forward, answer


def main(rows: list[str]) -> int:
    """Print the table; 1 if planning is too slow anywhere."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    lines, late = [], False
    for row in rows:
        started = time.monotonic()
        taken, forward, answer = measured(simulated_step(row))
        bounds = _DEEP_BOUNDS if row == DEEP else _BOUNDS
        late |= taken.search > bounds[0] or taken.all > bounds[1]
        lines.append((row, str(forward), f"{taken.search:.1f}", f"{taken.all:.1f}", answer))
        console.print(f"{row}: {taken.search:.1f} s, {taken.all:.1f} s ({time.monotonic() - started:.0f} s for everything)")
    table = Table(*_HEADER, title=_TITLE)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if rows == all_rows():
        parts = [f"# {_TITLE}", "", _row(_HEADER), _row(["---"] * len(_HEADER)), *map(_row, lines)]
        (_ROOT / "benchmarks" / "results" / "planning.md").write_text("\n".join(parts) + "\n")
    return int(late)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or all_rows()))
