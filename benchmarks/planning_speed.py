"""How long planning takes: `python benchmarks/planning_speed.py [ROW…]`.

Each step is built without memory and planned for half of its peak above the fixed part. Timing ops comes first, once for this machine,
and is not counted; then a second plan is: the search alone, and all of it with its simulated captures. Seconds are CPU seconds, of this
process and of those it starts, so that a busy machine does not count. Exits with 1 if a bound is passed: 5 s for the search and 15 s for
all of it, 30 s for a transformer of 48 layers with more than 2,500 operators in forward.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memfit
from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.planner.proposing import Proposer
from zoo import ROWS, make_step

DEEP = "48 layers"
_SHARE = 0.5
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
    plain = {name: getattr(Proposer, name) for name in ("propose", "lowest")}

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


def measured(build: Callable[[], Step]) -> tuple[Taken, int, str]:
    """Seconds, operators in forward, and what came of it."""
    step = built_without_memory(build)
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
    table = Table("row", "ops in forward", "search", "all", "", title="CPU seconds for a plan at half of the peak")
    console = Console(width=None if sys.stdout.isatty() else 160)
    late = False
    for row in rows:
        started = time.monotonic()
        taken, forward, answer = measured(deep if row == DEEP else partial(make_step, row))
        bounds = _DEEP_BOUNDS if row == DEEP else _BOUNDS
        late |= taken.search > bounds[0] or taken.all > bounds[1]
        table.add_row(row, str(forward), f"{taken.search:.1f}", f"{taken.all:.1f}", answer)
        console.print(f"{row}: {taken.search:.1f} s, {taken.all:.1f} s ({time.monotonic() - started:.0f} s for everything)")
    console.print(table)
    return int(late)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*ROWS, DEEP]))
