"""glibc's own calls, where its malloc is in use."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from memfit.levers.lever import CannotApply
from memfit.levers.undo import Undo

_THRESHOLDS = (  # malloc.h's number, the variable that children read it from, and where glibc's own moving threshold ends in training
    (-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),
    (-1, "MALLOC_TRIM_THRESHOLD_", 64 * 2**20),
)


def of_glibc(name: str) -> Any:
    """The call of this name; CannotApply where this process has another malloc."""
    found = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    other = [part for part in ("jemalloc", "tcmalloc", "mimalloc") if part in os.environ.get("LD_PRELOAD", "")]
    if found is None or other:
        whose = other[0] if other else "this system's malloc"
        raise CannotApply(
            f"{whose} is in use, and {name} is glibc's own: set the allocator up by its own variables, or leave this lever out."
        )
    return found


def give_back_at_once(size: int, undo: Undo) -> None:
    """Blocks from this size on go back to the system when they are freed, in this process and in children it starts.

    glibc moves its thresholds by itself until one is set, and never again after: undoing sets what the user had set, or what they
    had grown to.
    """
    mallopt = of_glibc("mallopt")
    for number, variable, settled in _THRESHOLDS:
        undo.then(mallopt, number, int(os.environ.get(variable, str(settled)), base=0))
        mallopt(number, size)
        set_variable(variable, str(size), undo)


def set_variable(name: str, value: str, undo: Undo) -> None:
    """Set a variable of the environment."""
    before = os.environ.get(name)
    undo.then(os.environ.pop, name, None) if before is None else undo.then(os.environ.__setitem__, name, before)
    os.environ[name] = value
