"""Python's and NumPy's own random numbers: every part of a batch meets the same ones, as if the batch had been whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

State = tuple[Any, Any]


class PythonDraws:
    """Entered for one part after the other: each starts from the state the first one met, and leaves the state the first one left.

    >>> draws, seen = PythonDraws(), []
    >>> for part in range(2):
    ...     with draws.part():
    ...         seen.append(random.random())
    >>> seen[0] == seen[1]
    True
    """

    def __init__(self) -> None:
        self._before: State | None = None
        self._after: State | None = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part's turn."""
        if self._before is None:
            self._before = _state()
        else:
            _set(self._before)
        try:
            yield
        finally:
            if self._after is None:
                self._after = _state()
            _set(self._after)


def _state() -> State:
    return random.getstate(), np.random.get_state()


def _set(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
