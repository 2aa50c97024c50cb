"""Ways to run the same training step with less memory that people use today."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import memfit

BUDGETS = (1.0, 0.5, 0.2, 0.05)  # of torch.compile's activation_memory_budget


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
    slices = [memfit.step.batches.map_tensors(lambda t, i=i: t.chunk(parts)[i], step.batch) for i in range(parts)]
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
