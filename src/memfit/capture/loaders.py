"""What a DataLoader adds to the process tree: its workers, and pinned batches waiting in a queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from memfit.batches import tensors_in
from memfit.ops.random_samples import draws_random_numbers
from memfit.ops.sample_cache import cached_bytes

_LONGEST_WAIT = 40  # looks, a twentieth of a second apart


@dataclass(frozen=True)
class Workers:
    """A loader's processes and what they add to the process tree: pages they share with us are counted with us (USS)."""

    count: int = 0
    bytes: int = 0
    pinned_bytes: int = 0
    waiting_bytes: int = 0
    prefetch: int = 0
    cached_bytes: int = 0
    draw: bool = False

    def of_process(self) -> dict[str, Any]:
        """The same as parts of a Process."""
        return {
            "workers_bytes": self.bytes,
            "workers": self.count,
            "pinned_bytes": self.pinned_bytes,
            "waiting_bytes": self.waiting_bytes,
            "prefetch": self.prefetch,
            "cached_bytes": self.cached_bytes,
            "workers_draw": self.draw,
        }


def loader_workers(loader: Any) -> Workers:
    """Start the loader's workers, take one batch, and see what they add; then stop them again."""
    if not isinstance(loader, DataLoader):
        return Workers()
    if loader.num_workers == 0:
        return Workers(cached_bytes=cached_bytes(loader.dataset))
    known = {child.pid for child in psutil.Process().children()}
    with _started(loader) as (batch, iterator):
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in known]
        alone = _settled_bytes(children)
        del iterator
    prefetch = loader.prefetch_factor or 2
    waiting = loader.num_workers * prefetch * sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
    return Workers(
        loader.num_workers,
        alone + waiting,  # waiting batches lie in shared memory, which no process of ours has mapped
        waiting if loader.pin_memory else 0,
        waiting,
        prefetch,
        cached_bytes(loader.dataset),
        draws_random_numbers(loader.dataset),
    )


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


def _settled_bytes(children: list[psutil.Process]) -> int:
    """What they hold when their queues are full; while they still fetch, the batch in their hands comes and goes."""
    seen = [0]
    for _ in range(_LONGEST_WAIT):
        seen.append(sum(_own_bytes(child) for child in children))
        if abs(seen[-1] - seen[-2]) < 0.01 * seen[-1]:
            break
        time.sleep(0.05)
    return seen[-1]


def _own_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
