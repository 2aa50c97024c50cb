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
from collections.abc import Sequence
from pathlib import Path

import torch

import memfit
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.measured import Taken, measure


def measure_apart(calls: Sequence[Call]) -> list[Taken | None]:
    """What each call takes; None for one that fails, or that brings its process down."""
    if not calls:
        return []
    told = _told_by_a_process(calls)
    if told is not None:
        return told
    if len(calls) == 1:
        return [None]
    middle = len(calls) // 2  # the culprit is in one half; the others still count
    return measure_apart(calls[:middle]) + measure_apart(calls[middle:])


def _told_by_a_process(calls: Sequence[Call]) -> list[Taken | None] | None:
    settings = (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled())
    here = str(Path(memfit.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((settings, [call.portable() for call in calls])),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        found = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else None
    except (ValueError, IndexError):
        return None
    return None if found is None else [Taken(*taken) if taken else None for taken in found]


def _main() -> None:
    (threads, onednn, deterministic), portable = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn
    torch.use_deterministic_algorithms(deterministic)
    taken = measure([Call.from_portable(*parts) for parts in portable])
    print(json.dumps([(t.inside, t.kept) if t else None for t in taken]))


if __name__ == "__main__":
    _main()
