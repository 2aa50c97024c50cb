"""Measures calls in a process of their own.

A call with shapes that no program asked for may be one its kernel does not check, and write where it must not: that may cost a
process, but never the user's. Run as a module, it reads pickled calls on standard input and prints what they took.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

import memfit
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.measured import Taken, measure

_MOST_SECONDS = 120.0  # for a process; what it is at then is not waited for


def measure_apart(calls: Sequence[Call]) -> list[Taken | None]:
    """What each call takes; None for one that fails, that brings its process down, or that never ends."""
    if not calls:
        return []
    told, begun = _told_by_a_process(calls)
    if told is not None:
        return told
    if not begun:
        return [None] * len(calls)
    culprit = begun - 1  # the others still count
    return [*measure_apart(calls[:culprit]), None, *measure_apart(calls[culprit + 1 :])]


def _told_by_a_process(calls: Sequence[Call]) -> tuple[list[Taken | None] | None, int]:
    """What it says of all calls, if it comes to that; and how many it has begun."""
    settings = (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled())
    here = str(Path(memfit.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((settings, [call.portable() for call in calls])),
            capture_output=True,
            env=os.environ | {"PYTHONPATH": path},
            timeout=_MOST_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failed:
        return None, min(len(calls), len((failed.stdout or b"").splitlines()))
    found = json.loads(ran.stdout.splitlines()[-1])
    return [Taken(*taken) if taken else None for taken in found], len(calls)


def _announced(calls: Iterable[Call]) -> Iterator[Call]:
    """Each with a line when it begins, so that it is known which one never came back."""
    for call in calls:
        print(call.func, flush=True)
        yield call


def _main() -> None:
    (threads, onednn, deterministic), portable = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn
    torch.use_deterministic_algorithms(deterministic)
    taken = measure(_announced(Call.from_portable(*parts) for parts in portable))
    print(json.dumps([(t.inside, t.kept) if t else None for t in taken]))


if __name__ == "__main__":
    _main()
