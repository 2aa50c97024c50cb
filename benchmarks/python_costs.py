"""What memfit's own Python costs, on tensors so small that nothing else counts: `python benchmarks/python_costs.py`.

Where the planner's constants come from (`planner/watching.py`, and the seconds of a call in `planner/proposing.py`): microseconds for
each tensor that autograd saves under hooks, each operator of a watched module call, each decision; and what each operator of a further
micro-batch adds on four public models, beside what their kernels take in parts. CPU time, the minimum of several.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from rich.console import Console
from torch import nn

import memfit
from frontier import MODELS, cpu_seconds
from frontier_ways import micro_batched
from memfit.capture import capture
from memfit.capture.speeds import speeds_here
from memfit.fitting.timed_ledgers import seen_with_times
from memfit.levers import LEVERS
from memfit.levers.microbatch_line import micro_batch_line
from memfit.levers.saved import table_option
from memfit.levers.saved.table import CACHE
from memfit.planner.costs import seconds_of, slower_in_parts
from zoo import make_step

BLOCKS, LENGTH = 20, 40
ROUNDS = 60


class Block(nn.Module):
    """Of sines, which save their input, and products with a number, which save nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many of both as LENGTH says."""
        for _ in range(LENGTH):
            x = torch.sin(x) * 1.01
        return x


def mechanism(console: Console) -> None:
    """Hooks, watched operators, decisions: each added to what is there already."""
    model = nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(BLOCKS)))
    step = memfit.Step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.0), torch.randn(8, 64))
    trace = capture(step, True)
    products = [n for n, op in enumerate(trace.ops) if op.phase == "forward" and op.name == "aten.mul.Tensor"]
    tables = {"hooks": products[:1], "looks": products[::LENGTH], "decisions": products}
    seconds = {"plain": _seconds(step)}
    for name, decided in tables.items():
        with LEVERS["saved"].apply(step, table_option(trace, dict.fromkeys(decided, CACHE), name)):
            seconds[name] = _seconds(step)
    watched = sum(op.phase == "forward" for op in trace.ops)
    look = (seconds["looks"] - seconds["hooks"]) / (watched * (BLOCKS - 1) / BLOCKS)
    hook = (seconds["hooks"] - seconds["plain"] - look * watched / BLOCKS) / len(trace.saved)
    decision = (seconds["decisions"] - seconds["looks"]) / (len(products) - BLOCKS)
    for words, cost in {"a saved tensor under hooks": hook, "an operator watched": look, "a decision": decision}.items():
        console.print(f"{words}: {cost * 1e6:.1f} µs")


def _seconds(step: memfit.Step) -> float:
    return min(cpu_seconds(step) for _ in range(ROUNDS))


def further_micro_batches(name: str, console: Console) -> None:
    """Plain accumulation in two, four and eight parts beside the whole batch; what is left when kernels are counted is the calls'."""
    step = make_step(MODELS[name][0])
    trace = seen_with_times(step).trace
    assert trace is not None
    counts = [count for count in (2, 4, 8) if count <= step.batch_size]
    ways: dict[int, Callable[[], object]] = {1: lambda: nullcontext(step)} | {c: lambda c=c: micro_batched(step, c) for c in counts}
    fastest = dict.fromkeys(ways, float("inf"))
    for _ in range(5):
        for count, enter in ways.items():
            with enter() as way:  # type: ignore[attr-defined]
                fastest[count] = min(fastest[count], cpu_seconds(way))
    differentiated = [op.phase != "optimizer" for op in trace.ops]
    whole = float(seconds_of(trace, speeds_here())[differentiated].sum())
    for count in counts:
        size = step.batch_size // count
        part = float(seconds_of(micro_batch_line(trace, size, replays=False), speeds_here())[differentiated].sum())
        kernels = part * count * slower_in_parts(trace, size)
        a_call = (fastest[count] / fastest[1] * whole - kernels) / ((count - 1) * len(trace.ops))
        console.print(f"{name}, {count} parts: {fastest[count] / fastest[1]:.2f} of the time, {a_call * 1e6:.1f} µs a call")


def main() -> None:
    """All of it."""
    console, started = Console(), time.monotonic()
    mechanism(console)
    for name in ("diffusers_unet", "vit", "gpt2", "resnet"):
        further_micro_batches(name, console)
    console.print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
