"""Ways to train the same thing, measured side by side: each in a process of its own, timed in turns."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

import memfit
from memfit.capture.process import HighWaterMark
from memfit.capture.unwatched import peak_of_a_step
from memfit.fitting.applying import apply_plan
from memfit.units import parse_bytes
from recipes.kit.budget import levers_in_words, proof_in_words

Result = TypeVar("Result")
_LONG = 180.0  # seconds


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
    """Peak: torch's own memory events. Process: the kernel's high-water mark over the first two steps. Seconds: CPU time of the fastest."""

    name: str
    peak_bytes: int = 0
    process_bytes: int = 0
    seconds: float = float("inf")
    wall_seconds: float = float("inf")
    plan: str = ""
    verdict: str = ""
    refused: str = ""  # why it could not be run at all


def measure(ways: Sequence[Way], rounds: int = 3, progress: Callable[[str], None] = print) -> list[Measured]:
    """Each way's memory, then its time in so many turns, interleaved, so that a busy machine slows all alike.

    A step that takes three minutes is not run again for its time: what disturbs it does not matter much.
    """
    found, workers = [], {}
    for way in ways:
        progress(f"{way.name}: building and measuring")
        worker = _Worker(way)
        found.append(result := worker.ask("memory"))
        if not result.refused:
            workers[way.name] = worker
    for turn in range(rounds):
        for result in found:
            if result.name in workers and result.wall_seconds < _LONG:
                progress(f"{result.name}: timing, {turn + 1} of {rounds}")
                timed = workers[result.name].ask("time")
                result.seconds = min(result.seconds, timed.seconds)
                result.wall_seconds = min(result.wall_seconds, timed.wall_seconds)
    for worker in workers.values():
        worker.stop()
    return found


class _Worker:
    def __init__(self, way: Way) -> None:
        self.way = way
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(way, there))
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
    """In the way's own process: build, put the plan on, then answer until nobody asks any more."""
    step, plan, verdict = _built(way), "", ""
    if way.budget is not None:
        try:
            fitting, verdict = apart(_planned, way)
        except memfit.MemfitError as error:
            pipe.recv()
            pipe.send(Measured(way.name, refused=str(error)))
            return
        apply_plan(step, fitting)
        plan = levers_in_words(fitting)
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        result = _memory(way.name, step) if what == "memory" else _time(way.name, step)
        result.plan, result.verdict = plan, verdict
        pipe.send(result)


def _built(way: Way) -> memfit.Step:
    module, _, function = way.make.partition(":")
    step: memfit.Step = getattr(importlib.import_module(module), function)(**way.settings)
    return step


def _planned(way: Way) -> tuple[memfit.Plan, str]:
    assert way.budget is not None
    step = _built(way)
    plan = memfit.plan(step, way.budget, allow=way.allow)
    # The plain step is measured on this machine too, so it may be compared with all the memory there is, not only the budget.
    verdict = memfit.verify(step, plan, limit_bytes=max(parse_bytes(way.budget), psutil.virtual_memory().available * 3 // 4))
    return plan, proof_in_words(verdict)


def apart(function: Callable[..., Result], *values: Any) -> Result:
    """The function's answer, from a process that has done nothing else: what a proof leaves in the heap is not what training takes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def _memory(name: str, step: memfit.Step) -> Measured:
    """The process first, while nothing but training has been in it; optimizers have their states from the second step on."""
    with HighWaterMark() as mark:
        step.run(step.batch)
        second = _time(name, step)
    return replace(second, peak_bytes=peak_of_a_step(step), process_bytes=mark.bytes)


def _time(name: str, step: memfit.Step) -> Measured:
    cpu, wall = time.process_time(), time.perf_counter()
    step.run(step.batch)
    return Measured(name, seconds=time.process_time() - cpu, wall_seconds=time.perf_counter() - wall)
