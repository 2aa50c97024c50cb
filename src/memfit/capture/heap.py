"""How much more than torch asked for the process's heap will hold: malloc keeps and splits what torch frees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from memfit.capture.allocations import Allocations

_HOLES = 0.2  # of the heap: one shared with the rest of a program has more holes than a replay alone (measured: 0.1 to 0.5)
_MOST_HOLES = 1.1  # measured: up to 1.0, in a process that had planned and proven before it trained
_OF_MALLOC = ("MALLOC_", "GLIBC_", "LD_")  # what the variables begin with that choose an allocator or set it up
_UNKNOWN_ALLOCATOR = (0.0, 0.1, 0.3)  # of the peak, where malloc cannot be asked


@dataclass(frozen=True)
class Slack:
    """Bytes beyond the peak that the allocator holds: at least, likely, at most."""

    low: int
    likely: int
    high: int


def heap_slack(allocations: Allocations) -> Slack:
    """What malloc will hold beyond the peak, by replaying the step through this machine's own malloc.

    Other variables would lie in that process's heap too, and holes among them move what follows: the same step would be predicted to take
    hundreds of MiB more in one shell than in another.
    """
    settings = {name: value for name, value in os.environ.items() if name.startswith(_OF_MALLOC)}
    try:
        ran = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).with_name("heap_replay.py"))],
            input=json.dumps(asdict(allocations)),
            capture_output=True,
            text=True,
            env=settings,
            check=True,
            timeout=120,
        )
        found = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        low, likely, high = (int(share * allocations.peak) for share in _UNKNOWN_ALLOCATOR)
        return Slack(low, likely, high)
    extra, heap = max(0, found["peak"] - allocations.peak), found["heap"]
    return Slack(0, int(extra + _HOLES * heap), int(1.5 * extra + _MOST_HOLES * heap))
