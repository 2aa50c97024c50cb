"""Runs calls for real, on zeros, and reads from torch's memory events what they took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.workspaces.calls import Call


@dataclass(frozen=True, slots=True)
class Taken:
    """What a call took: beyond its outputs, at its own peak; and its outputs, which may hold more than they show."""

    inside: int
    kept: int


def measure(calls: Iterable[Call]) -> list[Taken | None]:
    """What each call takes; None for a call that cannot be run on zeros."""
    ran: list[bool] = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), MemoryEvents() as events:  # kernels keep more when training
        for call in calls:
            ran.append(_run(call, events))
    sections = iter(events.sections()[1::2])  # every other one lies between two calls
    return [_taken(next(sections)) if worked else None for worked in ran]


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


def _taken(changes: list[int]) -> Taken:
    kept = sum(changes)
    return Taken(peak_of(changes) - kept, kept)
