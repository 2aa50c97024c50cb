"""What a row of the zoo really takes, measured in a fresh process: `python truth.py peak|process ROW` prints one JSON object.

peak: torch's own allocator, by the memory events of torch.profiler, from before the model is built to the end of the third step.
process: the most the process ever held resident, over twenty steps and with no profiler; malloc's settings are the caller's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile, record_function

_PROFILED_STEPS = 3  # the first makes the optimizer's states, the last is like all later ones
_PLAIN_STEPS = 20  # the heap's holes have stopped growing by then
_LAST = "the last step"


def peak(row: str) -> dict[str, Any]:
    """The highest sum of live bytes during the last step; everything was allocated inside the session, so nothing is missed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
        from zoo import make_step

        step = make_step(row)
        for number in range(_PROFILED_STEPS):
            with record_function(_LAST if number == _PROFILED_STEPS - 1 else "a step"):
                step.run(step.batch)
    assert session.profiler is not None and session.profiler.kineto_results is not None
    return {"peak_bytes": _highest_during_last_step(session.profiler.kineto_results.events())}


def _highest_during_last_step(events: list[Any]) -> int:
    last = next(e for e in events if e.name() == _LAST)
    begin, end = last.start_ns(), last.start_ns() + last.duration_ns()
    live = highest = 0
    memory = [e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    for event in sorted(memory, key=lambda e: int(e.start_ns())):
        live += event.nbytes()
        if begin <= event.start_ns() <= end:
            highest = max(highest, live)
    return highest


def process(row: str) -> dict[str, Any]:
    """The high-water mark that Linux keeps of a process, from its start."""
    from zoo import make_step

    step = make_step(row)
    started = time.perf_counter()
    for _ in range(_PLAIN_STEPS):
        step.run(step.batch)
    seconds = (time.perf_counter() - started) / _PLAIN_STEPS
    marks = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {"process_bytes": int(marks[0]) * 1024, "step_seconds": seconds}


def _main(mode: str, row: str) -> None:
    measured = peak(row) if mode == "peak" else process(row)
    settings = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    print(json.dumps({"row": row, "torch": torch.__version__, "threads": torch.get_num_threads(), "malloc": settings} | measured))


if __name__ == "__main__":
    _main(*sys.argv[1:])
