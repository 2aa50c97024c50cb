"""Functions that remember their results for a whole process, and what a simulation must not leave in them."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.step.batches import tensors_in
from memfit.torch_private import FakeTensor


@contextmanager
def no_fakes_cached() -> Iterator[None]:
    """A library's `lru_cache` that is filled with fake tensors inside would hand them to real training later: it is emptied."""
    before = [(cached, cached.cache_info().misses) for cached in _remembering(len(sys.modules))]
    try:
        yield
    finally:
        known = {id(cached) for cached, _ in before}
        new = [(cached, 0) for cached in _remembering(len(sys.modules)) if id(cached) not in known]
        for cached, misses in (*before, *new):
            if cached.cache_info().misses != misses and _holds_fakes(cached):
                cached.cache_clear()


@functools.lru_cache(maxsize=1)
def _remembering(modules: int) -> list[Any]:
    """All such functions but torch's own; looked for again when modules were imported, since that takes a while."""
    found = (it for it in gc.get_objects() if type(it) is functools._lru_cache_wrapper)
    return [it for it in found if not str(getattr(it, "__module__", "")).startswith("torch.")]


def _holds_fakes(cached: Any) -> bool:
    return any(isinstance(t, FakeTensor) for _, t in tensors_in(gc.get_referents(cached)))
