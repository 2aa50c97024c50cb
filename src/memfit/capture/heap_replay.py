"""Replays a step's allocations through this machine's own malloc and tells how large the heap gets. Nothing is written to the memory.

Runs as a script of its own (plain Python, no torch), so that the heap is fresh and malloc's environment variables count:
reads {"fixed": [[block, bytes], …], "late": […], "line": [[block, bytes or 0], …]} on standard input; 0 frees the block.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

STEPS = 8  # the heap's growth has levelled off by then


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


class _Heap:
    """The process's heap through libc, with torch's alignment, and small companions as autograd's nodes are beside each tensor."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = _Mallinfo
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._blocks: dict[Any, tuple[int | None, int, int]] = {}
        self._start = self._sizes()
        self.live = self.highest_live = self.peak = self.heap = 0

    def _sizes(self) -> tuple[int, int]:
        info = self._libc.mallinfo2()
        return info.arena, info.hblkhd

    def allocate(self, block: Any, size: int) -> None:
        address = ctypes.c_void_p()
        self._libc.posix_memalign(ctypes.byref(address), 64, size)
        self._blocks[block] = (address.value, self._libc.malloc(300), size)
        self.live += size
        self.highest_live = max(self.highest_live, self.live)
        if size >= 65_536 and self.live > 0.7 * self.highest_live:  # asking is slow, and the peak lies where much is live
            arena, mapped = self._sizes()
            self.heap = max(self.heap, arena - self._start[0])
            self.peak = max(self.peak, arena + mapped - sum(self._start))

    def free(self, block: Any) -> None:
        address, companion, size = self._blocks.pop(block)
        self._libc.free(address)
        self._libc.free(companion)
        self.live -= size


def replay(events: dict[str, list[list[int]]]) -> dict[str, int]:
    """The highest total and the highest heap part of it, over several steps."""
    heap = _Heap()
    for block, size in events["fixed"]:
        heap.allocate(block, size)
    for step in range(STEPS):
        for block, size in events["line"]:
            if size:
                heap.allocate(block, size)
            else:
                heap.free(block)
        for block, size in events["late"] if step == 0 else ():  # the optimizer's states come at the end of the first step
            heap.allocate(block, size)
    return {"peak": heap.peak, "heap": heap.heap}


if __name__ == "__main__":
    json.dump(replay(json.load(sys.stdin)), sys.stdout)
