"""What the operating system or the driver sees of the process: its base, its high-water mark, and what is predicted for both."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import psutil

from memfit.capture.allocations import Allocations
from memfit.capture.cgroups import room_in_cgroups
from memfit.capture.cuda_allocator import CachingAllocator
from memfit.capture.heap import Slack, heap_slack
from memfit.capture.loaders import loader_workers
from memfit.records import Ledger, Process, Trace
from memfit.step import Step
from memfit.step.batches import tensors_in

_WARM_UP = 45 * 2**20  # kernels' code, threads and their buffers, from the first step on (measured: 28 to 65 MiB)
_WARM_UP_UNSURE = 25 * 2**20
CUDA_CONTEXT = 480 * 2**20  # driver context and libraries: between 300 and 600 MiB on common cards, not measured here
_CUDA_CONTEXT_UNSURE = 150 * 2**20


def resident_bytes() -> int:
    """What the process holds in memory now."""
    return int(psutil.Process().memory_info().rss)


def memory_left() -> int:
    """What this process may grow to: the machine's free memory and what it holds already, or what its control groups leave to it."""
    held = resident_bytes()
    return int(min(held + psutil.virtual_memory().available, room_in_cgroups(held)))


def base_bytes(step: Step) -> int:
    """What the process holds beside the step's own tensors: interpreter and libraries."""
    give_back_free_memory()
    tensors = [t for model in step.models.values() for t in (*model.parameters(), *model.buffers())]
    tensors += [t for _, t in tensors_in(step.batch)]
    tensors += [t for o in step.optimizers for state in o.state.values() for _, t in tensors_in(dict(state))]
    ours = {id(t.untyped_storage()): t.untyped_storage() for t in tensors if t.device.type == "cpu" and type(t).__name__ != "FakeTensor"}
    return max(0, resident_bytes() - sum(s.nbytes() for s in ours.values()))


class HighWaterMark:
    """The most the process held while this was entered. Linux resets its own mark; elsewhere the larger end is taken."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> HighWaterMark:
        give_back_free_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.bytes = resident_bytes()
        return self

    def __exit__(self, *exc: object) -> None:
        marks = [line.split()[1] for line in _status() if line.startswith("VmHWM")]
        self.bytes = max(self.bytes, int(marks[0]) * 1024 if marks else resident_bytes())


def _status() -> list[str]:
    try:
        return Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []


def give_back_free_memory() -> None:
    """Let malloc return what it keeps of freed memory, so that it does not count as in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def predicted_process(trace: Trace, step: Step, base: int) -> Process:
    """The process's parts, predicted from the trace; `base` was taken before the simulation."""
    allocations = Allocations.of(trace)
    workers = loader_workers(step.loader).with_batches(step.running.loader_batches)
    if trace.device == "cuda":  # the driver counts its own memory: loader workers are in the host's
        slack, host = _reserved_slack(allocations), base + _WARM_UP + workers.bytes
        unsure = _CUDA_CONTEXT_UNSURE
        return Process(CUDA_CONTEXT, slack.low - unsure, slack.likely, slack.high + unsure, host_bytes=host)
    slack, unsure = heap_slack(allocations), _WARM_UP_UNSURE
    process = Process(base + _WARM_UP, slack.low - unsure, slack.likely, slack.high + unsure, **workers.of_process())
    return step.running.beside(trace, process) if step.running.beside else process


def warmed_up_once(later: Ledger, first: Ledger) -> Ledger:
    """A later prediction of the same process: what was warmed up meanwhile is in its base already, and was counted once more."""
    twice = max(0, min(_WARM_UP, later.process.base_bytes - first.process.base_bytes))
    return replace(
        later,
        process_bytes=later.process_bytes - twice,
        process_low_bytes=later.process_low_bytes - twice,
        process_high_bytes=later.process_high_bytes - twice,
        process=replace(later.process, base_bytes=later.process.base_bytes - twice),
    )


def _reserved_slack(allocations: Allocations) -> Slack:
    """What CUDA's caching allocator reserves beyond what it hands out."""
    allocator = CachingAllocator()
    for block, size in allocations.steps(2):
        if size:
            allocator.allocate(block, size)
        else:
            allocator.free(block)
    extra = max(0, allocator.peak_reserved_bytes - allocations.peak)
    return Slack(0, extra, extra + allocations.peak // 20)
