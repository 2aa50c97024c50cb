"""Runs calls for real, on zeros, and reads from torch's memory events what they took inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.workspaces.calls import Call


def measure(calls: Sequence[Call]) -> list[int | None]:
    """The bytes each call takes beyond its outputs, at its own peak; None for a call that cannot be run on zeros."""
    ran: list[bool] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), MemoryEvents() as events:
        for call in calls:
            ran.append(_run(call, events))
    sections = iter(events.sections()[1::2])  # every other one lies between two calls
    return [_beyond_outputs(next(sections)) if worked else None for worked in ran]


def _run(call: Call, events: MemoryEvents) -> bool:
    args, kwargs = call.make()
    try:
        call.func(*args, **kwargs)  # the first run of a kernel may set things up
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError):
        return False
    events.marker()
    made = call.func(*args, **kwargs)
    events.marker()  # closes the section while its outputs are alive
    del made
    return True


def _beyond_outputs(changes: list[int]) -> int:
    return peak_of(changes) - sum(changes)
