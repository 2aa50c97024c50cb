"""A step run for real with nothing but memory events around it: for what does not run as it would under a recorder, as compiled code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.rollback import rolled_back
from memfit.step import Step
from memfit.step.batches import tensors_in

_TIMED = 5  # steps, of which the fastest counts


@dataclass(frozen=True, slots=True)
class Unwatched:
    """What a step took: its peak by torch's memory events, as `Ledger.peak_bytes` has it, and its time."""

    peak_bytes: int
    seconds: float
    first_seconds: float  # of the first step, in which compilers work


def run_unwatched(step: Step, progress: Callable[[str], None] = lambda words: None) -> Unwatched:
    """Run the step a few times, look at its memory once, and put everything back."""
    with rolled_back(step):
        progress("running a first step")
        first = _timed(step)
        peak = peak_of_a_step(step)
        progress("timing steps")
        return Unwatched(peak, min(_timed(step) for _ in range(_TIMED)), first)


def peak_of_a_step(step: Step) -> int:
    """Train one step of one that has its optimizers' states, and tell its peak."""
    with MemoryEvents() as events:
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        before = _held(step)
        events.marker()
        step.run(step.batch, schedule=False)
    return before + peak_of(events.sections()[-1])


def _timed(step: Step) -> float:
    started = time.perf_counter()
    step.run(step.batch, schedule=False)
    return time.perf_counter() - started


def _held(step: Step) -> int:
    """Bytes that are there before a step: parameters, buffers, states and the batch."""
    tensors: list[torch.Tensor] = [t for model in step.models.values() for t in (*model.parameters(), *model.buffers())]
    tensors += [t for o in step.optimizers for state in o.state.values() for _, t in tensors_in(dict(state))]
    tensors += [t for _, t in tensors_in(step.batch)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
