"""HiGHS prints a line now and then that no option turns off."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def silence() -> Iterator[None]:
    """Nothing on the process's stdout, past Python's own. What other threads print meanwhile goes to stderr."""
    with suppress(AttributeError, OSError, ValueError):  # of a stdout that is not there
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed, as a daemon's is
        kept = -1
    if kept == -1:
        yield
        return
    meanwhile = _away_from_stdout()
    os.dup2(meanwhile, 1)
    try:
        yield
    finally:
        with suppress(AttributeError, OSError, TypeError):  # no such library: what C keeps of a line comes out later
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(meanwhile)


def _away_from_stdout() -> int:
    if threading.active_count() > 1:
        with suppress(OSError):
            return os.dup(2)
    return os.open(os.devnull, os.O_WRONLY)
