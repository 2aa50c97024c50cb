"""Peak against time: memfit's exact plans beside what people use today, in one run: `python benchmarks/frontier.py [MODEL…] [--rounds N]`.

For each model: the eager step; `torch.utils.checkpoint` on every block; torch.compile (aot_eager) under activation_memory_budget;
`save_on_cpu`; plain micro-batching; and memfit at 80, 60, 40, 30 and 20 % of eager's peak above the fixed part. Peaks are torch's own
memory events; times are CPU time, interleaved, the minimum of several. Gradients are compared with eager's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.applying import apply_levers
from memfit.capture.speeds import speeds_here
from memfit.levers import LEVERS
from memfit.planner.proposing import Proposer
from memfit.planning import options_of, rows_of
from zoo import make_step

MODELS = {  # row of the zoo, and the class of its blocks
    "monai_kl3d": ("monai_kl3d-b1-sgd-fp32", "AEKLResBlock"),
    "diffusers_unet": ("diffusers_unet-b8-sgd-fp32", "ResnetBlock2D"),
    "gpt2": ("gpt2-b8-sgd-fp32-drop", "GPT2Block"),
    "resnet": ("resnet-b16-sgd-fp32", "ResNetBottleNeckLayer"),
    "vit": ("vit-b8-sgd-fp32", "ViTLayer"),
}
SHARES = (0.8, 0.6, 0.4, 0.3, 0.2)
_SEED = 1


@dataclass
class Point:
    """One way to train the same step."""

    name: str
    peak: int = 0
    seconds: float = float("inf")
    gradients: str = ""
    limit: int | None = None


def gradients(step: memfit.Step) -> list[torch.Tensor]:
    """Of one step, from the same random numbers."""
    torch.manual_seed(_SEED)
    for p in step.model.parameters():
        p.grad = None
    step.differentiate(step.all_phases[0], step.batch, {}, None)
    return [p.grad for p in step.model.parameters() if p.grad is not None]


def peak_of(step: memfit.Step) -> int:
    """Above what was there before, by torch's own events."""
    gradients(step)
    for p in step.model.parameters():
        p.grad = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        gradients(step)
    live = highest = 0
    for event in sorted((e for e in session.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


@contextmanager
def checkpointed(step: memfit.Step, kind: str) -> Iterator[memfit.Step]:
    """Every module of a class under torch's checkpoint."""
    blocks = [m for m in step.model.modules() if type(m).__name__ == kind]
    for block in blocks:
        plain = block.forward
        block.forward = lambda *a, _plain=plain, **k: checkpoint(_plain, *a, use_reentrant=False, **k)
    try:
        yield step
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def compiled(step: memfit.Step, budget: float) -> Iterator[memfit.Step]:
    """The model through aot_eager, under torch's own memory budget."""
    import torch._functorch.config as config

    torch._dynamo.reset()
    before, config.activation_memory_budget = config.activation_memory_budget, budget
    model = copy.deepcopy(step.model)
    net = torch.compile(model, backend="aot_eager")
    loss = step.loss
    try:
        yield replace(step, model=model, loss=lambda m, b: loss(net, b), optimizer=torch.optim.SGD(model.parameters(), 0.0))
    finally:
        config.activation_memory_budget = before


@contextmanager
def offloaded(step: memfit.Step) -> Iterator[memfit.Step]:
    """save_on_cpu, which on a processor only copies."""
    step.running.around_loss.append(lambda phase: torch.autograd.graph.save_on_cpu())
    try:
        yield step
    finally:
        step.running.around_loss.pop()


@contextmanager
def fitted(step: memfit.Step, rows: Any) -> Iterator[memfit.Step]:
    """Levers of a plan."""
    with apply_levers(step, rows):
        yield step


def memfit_points(step: memfit.Step, eager: int, console: Console) -> Iterator[tuple[Point, Callable[[], Any]]]:
    """The planner's proposals at shares of eager's peak above the fixed part."""
    ledger = memfit.profile(step, simulate=True)
    before = sum(s.bytes for s in ledger.trace.storages if s.born < 0)
    weights = sum(p.numel() * p.element_size() for p in step.model.parameters() if p.requires_grad)
    levers = {name: LEVERS[name] for name in ("saved", "microbatch")}
    proposer = Proposer(ledger, levers, "reordered", speeds_here())
    for share in SHARES:
        limit = int(weights + share * (eager - weights))
        started = time.monotonic()
        found = proposer.propose(lambda ledger, most=before + limit: most, 5.0).fitting
        console.print(f"  memfit {share:.0%}: {'nothing fits' if not found else ''} planned in {time.monotonic() - started:.1f} s")
        if found:
            rows = rows_of(options_of(found[0]))
            what = " + ".join(r.option for r in rows)
            yield Point(f"memfit {share:.0%} ({what})", limit=limit), lambda rows=rows: fitted(step, rows)


def measure(name: str, rounds: int, compile_too: bool, console: Console) -> list[Point]:
    """Every way on one model, interleaved."""
    row, kind = MODELS[name]
    step = make_step(row)
    reference = [g.clone() for g in gradients(step)]
    eager = peak_of(step)
    ways: list[tuple[Point, Callable[[], Any]]] = [(Point("eager"), lambda: nullcontext(step))]
    ways += [(Point("checkpoint on every block"), lambda: checkpointed(step, kind)), (Point("save_on_cpu"), lambda: offloaded(step))]
    if compile_too:
        ways += [(Point(f"aot_eager, budget {b}"), lambda b=b: compiled(step, b)) for b in (1.0, 0.5, 0.2, 0.05)]
    ways += list(memfit_points(step, eager, console))
    for point, enter in ways:
        with enter() as changed:
            point.peak = peak_of(changed)
            point.gradients = compared(reference, gradients(changed))
            point.seconds = min(cpu_seconds(changed) for _ in range(rounds)) if "aot" in point.name else float("inf")
    for _ in range(rounds):
        for point, enter in ways:
            if "aot" not in point.name:  # compiling again for every round would take hours
                with enter() as changed:
                    point.seconds = min(point.seconds, cpu_seconds(changed))
    return [point for point, _ in ways]


def cpu_seconds(step: memfit.Step) -> float:
    """Of one forward and backward."""
    started = time.process_time()
    gradients(step)
    return time.process_time() - started


def compared(reference: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    """Same bits, or how far off, as a share of the largest gradient's norm."""
    if len(reference) == len(found) and all(map(torch.equal, reference, found)):
        return "same bits"
    whole = torch.stack([g.norm() for g in reference]).norm()
    off = torch.stack([(a - b).norm() for a, b in zip(reference, found, strict=True)]).norm() / whole
    return f"{float(off):.0e} off" if off < 1e-4 else f"WRONG, {float(off):.0%} off"


def main() -> None:
    """Measure, print, and write results/frontier.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    console = Console(width=140)
    out = Path(__file__).parent / "results" / "frontier.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in arguments.models:
        console.print(f"[bold]{name}")
        points = measure(name, arguments.rounds, not arguments.no_compile, console)
        table = Table("way", "peak", "of eager", "CPU time", "gradients", "inside its limit")
        for p in points:
            inside = "" if p.limit is None else "yes" if p.peak <= p.limit else "NO"
            share, slower = f"{p.peak / points[0].peak:.3f}", f"{p.seconds / points[0].seconds:.3f}"
            table.add_row(p.name, f"{p.peak / 2**20:.0f} MiB", share, slower, p.gradients, inside)
        console.print(table)
        results[name] = [vars(p) for p in points]
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
