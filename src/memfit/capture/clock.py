"""Times operator calls, in a process of its own: started as a file, it needs torch and nothing else, and costs nobody's memory.

It reads pickled settings, a limit of seconds and calls on standard input, and prints a line for each call when it is done: its seconds
and the processors' seconds, or null. When the limit is over it ends.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import time
from typing import Any

import torch

_TURNS = 5
_ENOUGH = 0.05  # seconds in which a call is repeated; the shortest turn counts


def seconds_of(name: str, args: Any, kwargs: Any) -> tuple[float, float] | None:
    """How long a call takes once it has been warmed up, and all processors together; None where it will not run on made-up values."""
    func: Any = functools.reduce(getattr, name.split("."), torch.ops)
    args, kwargs = _made(args), _made(kwargs)
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError):
        return None
    best, least, begun = float("inf"), float("inf"), time.perf_counter()
    for turn in range(_TURNS):
        started, computed = time.perf_counter(), time.process_time()
        func(*args, **kwargs)
        least, now = min(least, time.process_time() - computed), time.perf_counter()
        best = min(best, now - started)
        if turn and now - begun > _ENOUGH:
            break
    return min(best, least), least  # one processor alone would not take longer: the rest was another program


def _made(value: Any) -> Any:
    """Arguments with a tensor in place of each (size, stride, dtype) in a dict."""
    if isinstance(value, dict) and "stride" in value:
        return _tensor(**value)
    if isinstance(value, (tuple, list)):
        return type(value)(_made(item) for item in value)
    return {key: _made(item) for key, item in value.items()} if isinstance(value, dict) else value


def _tensor(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are written, since untouched zeros are read from one page; whole numbers are 0, which is valid as an index."""
    span = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0
    value = 0.5 if dtype.is_floating_point or dtype.is_complex else 0
    return torch.empty(span, dtype=dtype).fill_(value).as_strided(size, stride)


def _main() -> None:
    (threads, onednn, deterministic), limit, calls = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn
    torch.use_deterministic_algorithms(deterministic)
    started = time.monotonic()
    for call in calls:
        print(json.dumps(seconds_of(*call)), flush=True)
        if time.monotonic() - started > limit:
            break


if __name__ == "__main__":
    _main()
