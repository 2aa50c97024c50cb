"""What a DataLoader adds to the process tree: its workers, and pinned batches waiting in a queue."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import psutil
from torch.utils.data import DataLoader, Sampler

from memfit.ops.random_samples import GENERATORS, draws_random_numbers
from memfit.ops.sample_cache import cached_bytes
from memfit.restoring import random_numbers_restored
from memfit.step.batches import tensors_in
from memfit.users_code import users_code

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

    def with_batches(self, times: float) -> Workers:
        """The same workers with batches of another size waiting."""
        waiting = int(times * self.waiting_bytes)
        grown = self.bytes - self.waiting_bytes + waiting
        return replace(self, bytes=grown, waiting_bytes=waiting, pinned_bytes=waiting if self.pinned_bytes else 0)

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


_KNOWN: WeakKeyDictionary[DataLoader[Any], dict[tuple[Any, ...], Workers]] = WeakKeyDictionary()  # starting them takes seconds


def loader_workers(loader: Any) -> Workers:
    """What the loader's workers add: they are started once for each setting of it that levers try."""
    if not isinstance(loader, DataLoader):
        return Workers()
    cached = cached_bytes(loader.dataset)
    if loader.num_workers == 0:
        return Workers(cached_bytes=cached)
    known, how = _KNOWN.setdefault(loader, {}), loader.multiprocessing_context
    setting = (loader.num_workers, loader.prefetch_factor, loader.pin_memory, how, cached)
    if setting not in known:
        known[setting] = _weighed(loader, cached)
    return known[setting]


def _weighed(loader: DataLoader[Any], cached: int) -> Workers:
    """Start the workers, take one batch, and see what they add; then stop them again."""
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
        cached,
        draws_random_numbers(loader.dataset),
    )


@contextlib.contextmanager
def _started(loader: DataLoader[Any]) -> Iterator[tuple[Any, Any]]:
    """A fresh iterator with its first batch, if it has one; what the user's own next iterator will give stays the same."""
    kept, loader._iterator = loader._iterator, None
    put_back = [_as_it_is(generator) for generator in _generators_in(loader)]
    iterator = None
    with random_numbers_restored():
        try:
            with users_code("its loader"):
                iterator = iter(loader)
                batch = next(iterator, None)
            yield batch, iterator
        finally:
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown:
                shutdown()
            loader._iterator = kept
            for again in put_back:
                again()


def _generators_in(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its own, its samplers', and those of samplers in these."""
    waiting: list[Any] = [loader]
    seen: set[int] = set()
    while waiting:
        for name, value in getattr(waiting.pop(), "__dict__", {}).items():
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, GENERATORS):
                yield value
            elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                waiting.append(value)


def _as_it_is(generator: Any) -> Callable[[], object]:
    """What sets a generator to where it stands now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())  # torch's, and NumPy's older kind


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
