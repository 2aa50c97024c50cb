"""What a DataLoader adds to the process tree: its workers, and pinned batches waiting in a queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from memfit.batches import tensors_in


@dataclass(frozen=True)
class Workers:
    """A loader's processes and what they take together; pages they share with us are counted once (PSS)."""

    count: int = 0
    bytes: int = 0
    pinned_bytes: int = 0


def loader_workers(loader: Any) -> Workers:
    """Start the loader's workers, take one batch, and see what they hold; then stop them again."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return Workers()
    before = {child.pid for child in psutil.Process().children()}
    with _started(loader) as (batch, iterator):
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
        held = sum(_proportional_bytes(child) for child in children)
        del iterator
    waiting = loader.num_workers * (loader.prefetch_factor or 2)
    batch_bytes = sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
    return Workers(loader.num_workers, held, waiting * batch_bytes if loader.pin_memory else 0)


@contextlib.contextmanager
def _started(loader: DataLoader[Any]) -> Iterator[tuple[Any, Any]]:
    """A fresh iterator with its first batch; what the user's own next iterator will give stays the same."""
    kept, loader._iterator = loader._iterator, None
    generators = {id(g): g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    with torch.random.fork_rng(devices=[]):
        iterator = iter(loader)
        try:
            yield next(iterator), iterator
        finally:
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown:
                shutdown()
            loader._iterator = kept
            for generator, state in states:
                generator.set_state(state)


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(info, "pss", 0) or info.uss)
