"""torch's own account of CPU memory: the allocation events of torch.profiler, in order, cut at markers.

A marker is an allocation of a size nothing else asks for. It travels in the same stream as the events it separates, so no
clocks have to be compared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MARKER_BYTES = 8_191_999_983 % 65_521  # 40_009: an odd size that no tensor of whole elements wider than a byte has


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's native code announces itself on standard error; nobody asked it to."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class MemoryEvents:
    """Records what the CPU allocator hands out while it is entered; `marker()` starts the next section.

    >>> with MemoryEvents() as events:
    ...     events.marker()
    ...     kept = torch.ones(1024)
    >>> events.sections()[-1]
    [4096]
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    def __enter__(self) -> MemoryEvents:
        older = torch.empty(1)
        with quiet_stderr():
            self._profile.__enter__()
            del older  # torch warns, once, of a block that is older than the profile: let it do so now
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with quiet_stderr():
            self._profile.__exit__(kind, error, trace)

    @staticmethod
    def marker() -> None:
        """Everything from here to the next marker is one section."""
        torch.empty(_MARKER_BYTES, dtype=torch.uint8)

    def sections(self) -> list[list[int]]:
        """The changes in bytes, in order, a list for each section; the first one is what came before any marker."""
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        events = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == torch.profiler.DeviceType.CPU]
        events.sort(key=lambda e: e.start_ns())
        sections: list[list[int]] = [[]]
        for event in events:
            size = event.nbytes()
            if size == _MARKER_BYTES:
                sections.append([])
            elif size != -_MARKER_BYTES:
                sections[-1].append(size)
        return sections


def peak_of(changes: list[int]) -> int:
    """The highest sum reached on the way, at least 0.

    >>> peak_of([100, 50, -100, 20])
    150
    """
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest
