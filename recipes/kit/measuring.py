"""Ways to train the same thing, measured side by side: each in a process of its own, timed in turns."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

import memfit
from memfit.applying import apply_plan
from memfit.capture.process import HighWaterMark
from memfit.units import parse_bytes
from recipes.kit.budget import proof_in_words


@dataclass(frozen=True)
class Way:
    """A function that returns a Step, `package.module:function`, what it is called with, and the budget it is fitted to, if any."""

    name: str
    make: str
    settings: dict[str, Any] = field(default_factory=dict)
    budget: str | None = None
    allow: str = "reordered"


@dataclass
class Measured:
    """Peak: torch's own memory events. Process: the kernel's high-water mark over the timed steps. Seconds: CPU time of the fastest."""

    name: str
    peak_bytes: int = 0
    process_bytes: int = 0
    seconds: float = float("inf")
    wall_seconds: float = float("inf")
    plan: str = ""
    verdict: str = ""
    refused: str = ""  # why it could not be run at all


def measure(ways: Sequence[Way], rounds: int = 3, progress: Callable[[str], None] = print) -> list[Measured]:
    """Each way's memory, then its time in so many turns, interleaved, so that a busy machine slows all alike."""
    found, workers = [], {}
    for way in ways:
        progress(f"{way.name}: building and measuring")
        worker = _Worker(way)
        found.append(result := worker.ask("memory"))
        if not result.refused:
            workers[way.name] = worker
    for turn in range(rounds):
        for result in found:
            if result.name in workers:
                progress(f"{result.name}: timing, {turn + 1} of {rounds}")
                timed = workers[result.name].ask("time")
                result.seconds = min(result.seconds, timed.seconds)
                result.wall_seconds = min(result.wall_seconds, timed.wall_seconds)
                result.process_bytes = max(result.process_bytes, timed.process_bytes)
    for worker in workers.values():
        worker.stop()
    return found


class _Worker:
    def __init__(self, way: Way) -> None:
        self.way = way
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(way, there), daemon=True)
        self.process.start()
        there.close()

    def ask(self, what: str) -> Measured:
        try:
            self.here.send(what)
            answer = self.here.recv()
        except (EOFError, BrokenPipeError):
            self.process.join()
            answer = Measured(self.way.name, refused=f"the process ended with code {self.process.exitcode} (killed for memory?)")
        assert isinstance(answer, Measured)
        return answer

    def stop(self) -> None:
        self.here.close()
        self.process.join()


def _serve(way: Way, pipe: Connection) -> None:
    """In the way's own process: build, fit, then answer until nobody asks any more."""
    try:
        step, plan, verdict = _prepared(way)
    except memfit.MemfitError as error:
        pipe.recv()
        pipe.send(Measured(way.name, refused=str(error)))
        return
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        result = _memory(way.name, step) if what == "memory" else _time(way.name, step)
        result.plan, result.verdict = plan, verdict
        pipe.send(result)


def _prepared(way: Way) -> tuple[memfit.Step, str, str]:
    module, _, function = way.make.partition(":")
    step: memfit.Step = getattr(importlib.import_module(module), function)(**way.settings)
    if way.budget is None:
        return step, "", ""
    plan = memfit.plan(step, way.budget, allow=way.allow)
    # The plain step is measured on this machine too, so it may be compared with all the memory there is, not only the budget.
    verdict = memfit.verify(step, plan, limit_bytes=max(parse_bytes(way.budget), psutil.virtual_memory().available * 3 // 4))
    apply_plan(step, plan)
    levers = " + ".join(f"{lever.name}: {lever.option}" for lever in plan.levers) or "nothing to do"
    return step, levers, proof_in_words(verdict)


def _memory(name: str, step: memfit.Step) -> Measured:
    return Measured(name, peak_bytes=memfit.profile(step).peak_bytes)


def _time(name: str, step: memfit.Step) -> Measured:
    with HighWaterMark() as mark:
        cpu, wall = time.process_time(), time.perf_counter()
        step.run(step.batch)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Measured(name, process_bytes=mark.bytes, seconds=cpu, wall_seconds=wall)
