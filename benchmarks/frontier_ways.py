"""Ways to run the same training step with less memory: what people use today, and memfit's plans."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.applying import apply_levers
from memfit.capture.speeds import speeds_here
from memfit.captured_lever import with_captured
from memfit.compiling import measured_compile
from memfit.levers import LEVERS
from memfit.planner.proposing import Proposer
from memfit.planning import options_of, rows_of
from memfit.records import PlannedLever
from memfit.timed_ledgers import seen_with_times

BUDGETS = (1.0, 0.5, 0.2, 0.05)  # of torch.compile's activation_memory_budget
_MEMFIT = ("saved", "microbatch", "attention")
_RUN_STEPS = 10_000  # over which a compiler's seconds are spread


@dataclass
class Way:
    """One way to train: its family, and what has to be entered around each step."""

    family: str
    name: str
    enter: Callable[[], AbstractContextManager[memfit.Step]]
    limit: int | None = None  # the peak it promised
    peak: int = 0
    seconds: float = float("inf")
    gradients: str = ""
    set_up_seconds: float = 0.0  # compiling or planning

    def record(self) -> dict[str, Any]:
        """What is kept in results/frontier.json."""
        return {name: value for name, value in vars(self).items() if name != "enter"}


def peers(step: memfit.Step, block: str, compilers: tuple[str, ...]) -> Iterator[Way]:
    """Eager first; a way that the model does not allow is left out by whoever runs it."""
    yield Way("eager", "eager", lambda: nullcontext(step))
    yield Way("eager", "eager, once more", lambda: nullcontext(step))
    yield Way("checkpoint", "checkpoint on every block", lambda: _checkpointed(step, block))
    yield Way("save_on_cpu", "save_on_cpu", lambda: _offloaded(step))
    parts = 2
    while parts <= step.batch_size:
        yield Way("micro-batching", f"{parts} micro-batches", partial(micro_batched, step, parts))
        parts *= 2
    for compiler in compilers:
        for budget in BUDGETS:
            yield Way(compiler, f"{compiler}, budget {budget}", _compiled(step, compiler, budget))


def memfit_ways(step: memfit.Step, limits: list[int], note: Callable[[str], None], compiling: bool) -> Iterator[Way]:
    """The planner's fastest exact eager plan under each limit of the peak above what is there before the step; then those with compile."""
    ledger = seen_with_times(step)
    assert ledger.trace is not None
    before = sum(s.bytes for s in ledger.trace.storages if s.born < 0)
    levers = with_captured({name: LEVERS[name] for name in _MEMFIT}, step, ledger, seen_with_times, "reordered")
    yield from _planned_ways("memfit", step, Proposer(ledger, levers, "reordered", speeds_here()), before, limits, note)
    if compiling:
        levers |= {"compile": measured_compile(step, run_steps=_RUN_STEPS, progress=note)}
        proposer = Proposer(ledger, levers, "reordered", speeds_here())
        allowed = _planned_ways("memfit, compile allowed", step, proposer, before, limits, note)
        yield from {way.name: way for way in allowed if way.name.startswith("compile")}.values()  # the others are the ones above


def _planned_ways(
    family: str, step: memfit.Step, proposer: Proposer, before: int, limits: list[int], note: Callable[[str], None]
) -> Iterator[Way]:
    for limit in limits:
        started = time.monotonic()
        rows = _surely_inside(step, proposer, before + limit)
        seconds = time.monotonic() - started
        if rows is None:
            note(f"{family}: no exact plan is inside {limit / 2**20:.0f} MiB")
            continue
        name = " + ".join(f"{row.name}: {row.option}" for row in rows) or "nothing to do"
        yield Way(family, name, partial(_fitted, step, rows), limit, set_up_seconds=seconds)


def _surely_inside(step: memfit.Step, proposer: Proposer, most: int) -> list[PlannedLever] | None:
    """As `memfit.plan` does it: the fastest plan, captured once more, whose peak stays inside up to the upper end of its interval."""
    limit = most
    while found := proposer.propose(lambda combination, most=limit: most, 5.0).fitting:
        rows = rows_of(options_of(found[0]))
        if any(row.name == "compile" for row in rows):  # its peak was measured
            return rows
        with apply_levers(step, rows):
            high = memfit.profile(step, simulate=True).high_bytes
        if high <= most:
            return rows
        limit = min(limit, found[0].peak_bytes) - (high - most)
    return None


@contextmanager
def _checkpointed(step: memfit.Step, kind: str) -> Iterator[memfit.Step]:
    blocks = [m for m in step.model.modules() if type(m).__name__ == kind]
    assert blocks, f"no block is a {kind}"
    for block in blocks:
        plain = block.forward
        block.forward = lambda *a, _plain=plain, **k: checkpoint(_plain, *a, use_reentrant=False, **k)
    try:
        yield step
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def _offloaded(step: memfit.Step) -> Iterator[memfit.Step]:
    step.running.around_loss.append(lambda phase: torch.autograd.graph.save_on_cpu())
    try:
        yield step
    finally:
        step.running.around_loss.pop()


@contextmanager
def micro_batched(step: memfit.Step, parts: int) -> Iterator[memfit.Step]:
    """Accumulation as it is mostly written: equal slices, each with its own random numbers."""
    slices = [memfit.batches.map_tensors(lambda t, i=i: t.chunk(parts)[i], step.batch) for i in range(parts)]
    plain = step.loss

    class Accumulated:
        """Looks like a step to the benchmark."""

        model, batch, all_phases = step.model, step.batch, step.all_phases

        @staticmethod
        def differentiate(phase: Any, batch: Any, carries: Any, watcher: Any) -> None:
            for part in slices:
                (plain(step.model, part) / parts).backward()

    yield Accumulated()


def _compiled(step: memfit.Step, compiler: str, budget: float) -> Callable[[], AbstractContextManager[memfit.Step]]:
    """The model through torch.compile, under torch's own memory budget; compiled at the first step, then kept."""
    made: list[memfit.Step] = []

    @contextmanager
    def enter() -> Iterator[memfit.Step]:
        import torch._functorch.config as config

        if not made:
            model = copy.deepcopy(step.model)
            net, loss = torch.compile(model, backend=partial(_backend, compiler)), step.loss
            made.append(replace(step, model=model, loss=lambda m, b: loss(net, b), optimizer=torch.optim.SGD(model.parameters(), 0.0)))
        before, config.activation_memory_budget = config.activation_memory_budget, budget
        try:
            yield made[0]
        finally:
            config.activation_memory_budget = before

    return enter


def _backend(compiler: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """An object of its own for every way: torch would else give one budget's code to the next."""
    return torch._dynamo.lookup_backend(compiler)(graph, inputs)


@contextmanager
def _fitted(step: memfit.Step, rows: Any) -> Iterator[memfit.Step]:
    with apply_levers(step, rows):
        yield step
