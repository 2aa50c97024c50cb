"""How fast this machine multiplies, moves memory and writes to disk: a moment's measurement, for estimates of what nobody has timed."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable

import torch

from memfit.ops.lossless import packed
from memfit.ops.spill import Spill
from memfit.records import Speeds

_TRIES = 3
_VALUES = 1 << 22
_FRESH = 1 << 25
_TYPICAL = {  # of a middle-sized card and of a laptop's chip, for estimates that are said to be estimates
    "cuda": Speeds(flops=1.5e13, bytes=8e11, bits=1e11, host=1.2e10),
    "mps": Speeds(flops=5e12, bytes=2e11, bits=2.5e10),
}


def speeds_of(device: str) -> Speeds:
    """Measured for a CPU, typical ones for other devices."""
    return _TYPICAL.get(device) or speeds_here()


@functools.cache
def speeds_here() -> Speeds:
    """This machine's processors, measured once in a process, in well under a second."""
    with torch.no_grad():
        x, weight = torch.full((1, 16, 32, 32, 32), 0.5), torch.full((16, 16, 3, 3, 3), 0.5)  # no random numbers: those are the user's
        convolved = _seconds(lambda: torch.nn.functional.conv3d(x, weight, padding=1), _computing)
        values = torch.full((_VALUES,), 0.5)
        touched = _seconds(lambda: torch.nn.functional.silu(values), _computing)
        spill = Spill()
        written = _seconds(lambda: spill.write(values).get(), time.perf_counter)
        spill.close()
        packing = _seconds(lambda: [unpack() for unpack in [packed(values)] if unpack], _computing)
    moved = 8 * _VALUES  # there and back
    fresh = _FRESH / _seconds(_ask_for_pages, _computing)
    return Speeds(2 * 16 * 27 * x.numel() / convolved, moved / touched, moved / written, moved / packing, fresh=fresh, measured=True)


@functools.cache
def times_slower_in_half() -> float:
    """How long this machine takes for a convolution in bfloat16, against float32: below one where it has instructions for it."""
    with torch.no_grad():
        x, weight = torch.full((1, 64, 64, 64), 0.5), torch.full((64, 64, 3, 3), 0.5)
        small = x.bfloat16(), weight.bfloat16()
        fast = _seconds(lambda: torch.nn.functional.conv2d(x, weight), _computing)
        return _seconds(lambda: torch.nn.functional.conv2d(*small), _computing) / fast


def _ask_for_pages() -> None:
    """From the kernel, touch each, and give them back."""
    with mmap.mmap(-1, _FRESH) as memory:
        memory[:: mmap.PAGESIZE] = bytes(_FRESH // mmap.PAGESIZE)


def _computing() -> float:
    """The processors' time, spread over torch's threads: other programs on a busy machine do not count."""
    return time.process_time() / torch.get_num_threads()


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        started = clock()
        call()
        best = min(best, clock() - started)
    return best
