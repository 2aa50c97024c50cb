"""How long the operators of a simulated step take on this machine: each distinct call timed once, then remembered."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.remembered import Remembered, machine_kind
from memfit.capture.workspaces.shrinking import shorter_call
from memfit.records import Trace

_MOST_SECONDS = 5.0  # for all that is timed at once; what is left is estimated
_START_SECONDS = 60.0  # at most for a process to import torch, beyond that
_MOST_DEATHS = 3  # of processes, then the rest is estimated
_LONGEST_CALL = 0.15
_MOST_BYTES = 48 * 2**20  # of a call's arguments and results; longer and larger ones are timed on less
_GIVEN_UP: set[tuple[str, str]] = set()  # not reached in time: a second plan in this process sees the same seconds


class OpCalls:
    """`note` each op as it is recorded, and only those that take time."""

    def __init__(self) -> None:
        self.by_op: dict[int, Call] = {}

    def note(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the call; with the first op a recording begins anew."""
        if number == 0:
            self.by_op.clear()
        if func.namespace == "aten" and not func.is_view:
            self.by_op[number] = Call.of(func, args, kwargs)


def timed(trace: Trace, calls: OpCalls, estimates: Sequence[float], progress: Callable[[str], None]) -> Trace:
    """The trace with the seconds of its ops, where they could be timed; what is estimated to take most comes first."""
    keys = {number: call.key for number, call in calls.by_op.items()}
    weight, trials, made = dict[str, float](), dict[str, tuple[Call, float, int]](), _made_by_ops(trace)
    for number, key in keys.items():
        weight[key] = weight.get(key, 0.0) + estimates[number]
        trials.setdefault(key, (calls.by_op[number], estimates[number], made[number]))
    found = times_of({key: trials[key] for key in sorted(trials, key=lambda key: -weight[key])}, progress)
    seconds = {number: found[key][0] * max(1, trace.ops[number].parts) for number, key in keys.items() if key in found}
    return replace(trace, ops=tuple(replace(op, seconds=seconds.get(number)) for number, op in enumerate(trace.ops)))


def times_of(calls: Mapping[str, tuple[Call, float, int]], progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Each call's seconds, and those of all processors together, as remembered or measured now; without those that cannot be timed.

    Calls come by a word to remember them by, with an estimate of their seconds and with the bytes they make.
    """
    remembered, kind = Remembered("times"), machine_kind()
    new = [key for key in calls if remembered.get(key) is None and (kind, key) not in _GIVEN_UP]
    if new:
        progress(f"timing {len(new)} kinds of ops, once for this machine")
        found = dict(_timed_apart({key: _trial(*calls[key]) for key in new}, progress))
        remembered.put(found)
        _GIVEN_UP.update((kind, key) for key in new if key not in found)
    return {key: known for key in calls if (known := remembered.get(key))}


def _made_by_ops(trace: Trace) -> list[int]:
    made = [0] * len(trace.ops)
    for storage in trace.storages:
        if storage.born >= 0:
            made[storage.born] += storage.bytes
    return made


def _trial(call: Call, estimate: float, outputs: int) -> tuple[Call, float]:
    """What to run, and how many times as long the call itself takes; 0: nothing that is short and small enough is like it."""
    total = call.nbytes + outputs
    share = min(1.0, _MOST_BYTES / max(total, 1), _LONGEST_CALL / estimate)
    if share == 1.0:
        return call, 1.0
    return shorter_call(call, int(share * call.nbytes)) or (call, 0.0)


def _timed_apart(trials: dict[str, tuple[Call, float]], progress: Callable[[str], None]) -> Iterator[tuple[str, list[float]]]:
    """Both kinds of seconds by signature, [] for a call that cannot be timed; those that there was no time for are left out."""
    yield from ((key, []) for key, (_, times) in trials.items() if not times)
    left = [key for key, (_, times) in trials.items() if times]
    count, deaths = len(left), 0
    while left and deaths < _MOST_DEATHS:
        clock = _Clock([trials[key][0] for key in left], _MOST_SECONDS)
        for told, seconds in enumerate(clock.lines()):
            progress(f"timing ops, {count - len(left) + told + 1} of {count} kinds")
            yield left[told], [] if seconds is None else [spent * trials[left[told]][1] for spent in seconds]
        if not clock.died:
            return
        yield left[clock.told], []  # it brought its process down
        left, deaths = left[clock.told + 1 :], deaths + 1


class _Clock:
    """A process that times calls one after the other, until it is done, has used up its seconds, or dies."""

    def __init__(self, calls: Sequence[Call], seconds: float) -> None:
        self.told, self.died = 0, False
        settings = (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled())
        self._asked, self._count = pickle.dumps((settings, seconds, [call.plain() for call in calls])), len(calls)
        self._alarm_seconds = seconds + _START_SECONDS

    def lines(self) -> Iterator[list[float] | None]:
        """What it says."""
        command = [sys.executable, str(Path(__file__).with_name("clock.py"))]
        started = time.monotonic()
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ  # threads that spin while they wait make a busy machine look far slower
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(self._alarm_seconds, process.kill)
        alarm.start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(self._asked)
            for line in process.stdout:
                yield json.loads(line)
                self.told += 1
            in_time = time.monotonic() - started < self._alarm_seconds
            self.died = process.wait() != 0 and self.told < self._count and in_time
        finally:
            alarm.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
