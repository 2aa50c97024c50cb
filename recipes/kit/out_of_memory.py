"""Whether an error means that memory ran out."""

from __future__ import annotations

import torch


def ran_out(error: Exception) -> bool:
    """torch says it in an error of its own on a card, and in the words of its allocator on a CPU.

    >>> ran_out(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")), ran_out(ValueError("no"))
    (True, False)
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
