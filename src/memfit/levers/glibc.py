"""glibc's own calls, where its malloc is in use."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from memfit.levers.lever import CannotApply


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
