"""Holes in malloc's heap, given back while a step runs: looked for at each module's call and where its gradient begins."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.ledger.timeline import last_op, live_bytes
from memfit.levers.glibc import of_glibc
from memfit.records import Process, Trace
from memfit.step.batches import tensors_in

SECONDS_OF_A_CALL = 1e-5  # of a module, for three looks; most find that little time has passed
_BETWEEN_LOOKS = 0.004  # seconds of a thread, in which no more than _UNSEEN is handed out: pages come at a few bytes a nanosecond
_UNSEEN = 16 * 2**20
_LEAST_HOLES = 32 * 2**20
_REUSED = 0.5  # of what is free already when an operator asks for memory: the other half may lie in pieces that are too small
_LIKELY = 0.8  # of the most that may be left


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def holes_left(in_use: int, share: float) -> int:
    """Bytes that are not worth the pages: a share of what was in use, or a little."""
    return max(_LEAST_HOLES, int(share * in_use))


class HolesGivenBack:
    """Trims the heap when the process holds more than was ever in use at once, and a share of that beyond: not sooner, since pages cost."""

    def __init__(self, share: float) -> None:
        self._share, self._trim, self._info = share, of_glibc("malloc_trim"), of_glibc("mallinfo2")
        self._info.restype = _Mallinfo
        self._trim(0)
        self._looked, self._between = 0.0, _BETWEEN_LOOKS / torch.get_num_threads()
        self._most = self._in_use()
        self._beside = _resident() - self._most  # code and threads, no heap

    def look(self, *_: Any) -> None:
        """Give holes back if there are too many."""
        now = time.perf_counter()
        if now - self._looked < self._between:
            return
        self._looked = now
        held = _resident()
        if held <= self._allowed():
            return
        self._most = max(self._most, self._in_use())
        if held > self._allowed():
            self._trim(0)
            self._beside = max(self._beside, _resident() - self._in_use())  # what no trimming gives back is no hole

    @contextmanager
    def around_loss(self, phase: str) -> Iterator[None]:
        """Look before and after every module's call, and when backward comes to it."""
        before, after = register_module_forward_pre_hook(self.look), register_module_forward_hook(self._after_call)
        try:
            yield
        finally:
            before.remove()
            after.remove()
        self.look()

    def _after_call(self, module: Any, inputs: Any, output: Any) -> None:
        self.look()
        node = next((t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(self.look)

    def _allowed(self) -> int:
        return self._beside + self._most + holes_left(self._most, self._share)

    def _in_use(self) -> int:
        info = self._info()
        return int(info.uordblks + info.hblkhd)


def _resident() -> int:
    """As `capture.process` has it, in a third of the time."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 64).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def with_few_holes(trace: Trace, process: Process, share: float) -> Process:
    """What a process holds beside its tensors when larger holes are given back at every look."""
    unsure = max(0, -process.slack_low_bytes)  # of what a warm process holds beside its heap
    live = live_bytes(trace)
    holes = holes_left(int(live.max()) + process.base_bytes, share)
    most = holes + _UNSEEN + max(0, _most_at_once(trace, live) - int(live.max()))
    return replace(
        process,
        slack_bytes=min(process.slack_bytes, int(_LIKELY * most)),
        slack_high_bytes=min(process.slack_high_bytes, most + unsure),
    )


def _most_at_once(trace: Trace, live: NDArray[np.int64]) -> int:
    """At a look the process holds what was in use at any, holes apart; until the next, what is asked for may come on top of it."""
    count = len(trace.ops)
    starts = [now for now in range(count) if now == 0 or _is_looked_at(trace, now)]
    ends = np.repeat([*starts[1:], count], np.diff([*starts, count]))
    workspace = np.fromiter((op.workspace for op in trace.ops), np.int64, count)
    asked, change = np.zeros(count, np.int64), np.zeros(count + 1, np.int64)
    for storage in trace.storages:
        if storage.born >= 0:
            asked[storage.born] += storage.bytes
            change[storage.born] += storage.bytes
            change[min(last_op(storage, count), int(ends[storage.born]) - 1) + 1] -= storage.bytes
    in_use = (live - workspace - asked)[starts]
    since = np.maximum.reduceat(np.cumsum(change)[:count] + workspace, starts)
    grown = np.maximum(0, since - _REUSED * (in_use.max() - in_use))
    return int(in_use.max() + grown.max())


def _is_looked_at(trace: Trace, now: int) -> bool:
    """Whether somebody looks before an op: modules are entered and left in forward, in backward only entered."""
    here, last = trace.ops[now], trace.ops[now - 1]
    if (here.phase, here.loss) != (last.phase, last.loss):
        return here.phase != "optimizer"
    if here.phase == "backward":
        return here.module != last.module and not f"{last.module}.".startswith(f"{here.module}." if here.module else "")
    return here.phase == "forward" and here.module != last.module
