"""Peak against time: memfit's exact plans beside what people use today, in one run: `python benchmarks/frontier.py [MODEL…] [--rounds N]`.

For each model: the eager step; `torch.utils.checkpoint` on every block; `save_on_cpu`; plain micro-batching; torch.compile (aot_eager and
inductor) under activation_memory_budget; and memfit at shares of eager's peak above the fixed part (gradients), or the lowest it reaches,
with eager levers and, beside inductor, with the compile lever allowed. Peaks are torch's own memory events; times are CPU time,
interleaved, the minimum of several, with malloc keeping its pages, since what page faults cost depends on what ran before. Eager runs twice
under two names, and what lies between the two is the noise of the run. Where one of memfit's points seems beaten, it, its rival and eager
are run as often again, once. Gradients are compared with eager's; wrong are those further off than three times eager's own distance from
float64's. Each model's latest run is kept in results/frontier.json; results/frontier.md and frontier.svg are made of them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import memfit
from frontier_plans import memfit_ways
from frontier_report import dominated, table_of, write_report
from frontier_ways import Way, peers
from memfit.proof.draws import DrawsRecorded, DrawsReplayed
from memfit.proof.shelf import Shelf
from zoo import make_step

MODELS = {  # row of the zoo, and the class of its blocks
    "monai_kl3d": ("monai_kl3d-b1-sgd-fp32", "AEKLResBlock"),
    "diffusers_unet": ("diffusers_unet-b8-sgd-fp32", "ResnetBlock2D"),
    "gpt2": ("gpt2-b8-sgd-fp32-drop", "GPT2Block"),
    "llama": ("llama-b8-sgd-fp32", "LlamaDecoderLayer"),
    "resnet": ("resnet-b16-sgd-fp32", "ResNetBottleNeckLayer"),
    "vit": ("vit-b8-sgd-fp32", "ViTLayer"),
}
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
RESULTS = Path(__file__).parent / "results"
_SEED = 1
_SECONDS_OF_EAGER = 6
_AT_LEAST_OFF, _TIMES_OWN_ERROR = 1e-4, 3  # beyond both, gradients are wrong
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, 2**31 - 1  # of malloc.h


def gradients(step: memfit.Step) -> list[torch.Tensor]:
    """Of one step, from the same random numbers."""
    torch.manual_seed(_SEED)
    for p in step.model.parameters():
        p.grad = None
    step.differentiate(step.all_phases[0], step.batch, {}, None)
    return [p.grad for p in step.model.parameters() if p.grad is not None]


def peak_of(step: memfit.Step) -> int:
    """Above what was there before, by torch's own events."""
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


def measure(name: str, rounds: int, shares: tuple[float, ...], compilers: tuple[str, ...], console: Console) -> list[Way]:
    """Every way on one model: memory and gradients first, then the time in turns."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one model is compiled in many ways here
    row, kind = MODELS[name]
    step = make_step(row)
    gradients(step)  # a process's first step is now and then rounded otherwise than all later ones
    reference = [g.clone() for g in gradients(step)]
    eager = peak_of(step)
    fixed = sum(p.numel() * p.element_size() for p in step.model.parameters() if p.requires_grad)
    limits = [int(fixed + share * (eager - fixed)) for share in shares]
    ways = [*peers(step, kind, compilers), *memfit_ways(step, limits, console.print, compiling="inductor" in compilers)]
    own_error = rounding_of(step, reference)
    ways = [way for way in ways if examine(way, reference, own_error, console)]
    ways[0].gradients += f", {own_error:.0e} from float64's"
    keep_pages()  # not before: float64 needs many gigabytes for the autoencoder, and a heap that is never given back is in pieces by then
    rounds = max(rounds, math.ceil(_SECONDS_OF_EAGER / cpu_seconds(step)))  # short steps more often: they are noisier
    take_turns(ways, rounds)
    contested = {name for pair in dominated([way.record() for way in ways]) for name in pair}
    if contested:
        console.print(f"  once more: {', '.join(sorted(contested))}", highlight=False)
        take_turns([way for way in ways if way.family == "eager" or way.name in contested], rounds)
    return ways


def take_turns(ways: Sequence[Way], rounds: int) -> None:
    """Each way's least CPU time, the ways one after the other."""
    for _ in range(rounds):
        for way in ways:
            with way.enter() as changed:  # the first step after another way finds caches and heap in that one's state
                way.seconds = min(way.seconds, cpu_seconds(changed), cpu_seconds(changed))


def keep_pages() -> None:
    """From now on malloc gives no memory back to the system, so that a step meets few pages it has to be given anew."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def rounding_of(step: memfit.Step, reference: list[torch.Tensor]) -> float:
    """How far eager's gradients are from those of the same step in float64, with the same random draws."""
    recorded, model = DrawsRecorded(Shelf()), copy.deepcopy(step.model).double()
    with recorded:
        gradients(step)
    assert not recorded.unreplayable, f"{recorded.unreplayable} would draw other numbers in float64, and every way would look right"
    batch = memfit.step.batches.map_tensors(lambda t: t.double() if t.is_floating_point() else t, step.batch)
    with DrawsReplayed(recorded.shelf):
        exact = gradients(replace(step, model=model, batch=batch, optimizer=torch.optim.SGD(model.parameters(), 0.0)))
    return distance(exact, reference)


def examine(way: Way, reference: list[torch.Tensor], own_error: float, console: Console) -> bool:
    """Its peak and its gradients; False, and said, where the way does not work on this model."""
    console.print(f"  {way.name}", highlight=False)
    started = time.monotonic()
    try:
        with way.enter() as changed:
            way.gradients = compared(reference, gradients(changed), own_error)
            way.set_up_seconds = way.set_up_seconds or time.monotonic() - started
            way.peak = peak_of(changed)
    except Exception as error:
        console.print(f"    does not work here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return False
    return True


def cpu_seconds(step: memfit.Step) -> float:
    """Of one forward and backward."""
    started = time.process_time()
    gradients(step)
    return time.process_time() - started


def compared(reference: list[torch.Tensor], found: list[torch.Tensor], own_error: float) -> str:
    """Same bits, or how far off."""
    if len(reference) == len(found) and all(map(torch.equal, reference, found)):
        return "same bits"
    off = distance(reference, found)
    return f"{off:.0e} off" if off < max(_AT_LEAST_OFF, _TIMES_OWN_ERROR * own_error) else f"WRONG, {off:.0%} off"


def distance(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """As a share of the norm of all gradients."""
    whole = torch.stack([g.norm() for g in expected]).norm()
    return float(torch.stack([(a - b).norm() for a, b in zip(expected, found, strict=True)]).norm() / whole)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5, help="at least; steps shorter than 1.2 s are run more often")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of eager's peak above the fixed part")
    parser.add_argument("--compilers", nargs="*", default=["aot_eager", "inductor"])
    arguments = parser.parse_args()
    console, kept = Console(width=140), RESULTS / "frontier.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name in arguments.models:
        console.print(f"[bold]{name}")
        ways = measure(name, arguments.rounds, tuple(arguments.shares), tuple(arguments.compilers), console)
        results[name] = [way.record() for way in ways]
        console.print(table_of(results[name]))
        kept.write_text(json.dumps(results, indent=1) + "\n")
        write_report(results, RESULTS)


if __name__ == "__main__":
    main()
