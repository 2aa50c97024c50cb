"""Sums that threads add to in any order differ from run to run; for a comparison of bits they are taken in one order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms inside, for every run alike; where an op has none, it runs as it always does."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=not before[0] or before[1])
    settings.fill_uninitialized_memory = before[0] and fills  # it costs time, and hides reads of what was never written
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills
