"""The data loader's memory: worker processes, batches fetched ahead, pinned copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.reading import at_least, between, is_bool, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.ops.random_samples import draws_random_numbers
from memfit.ops.sample_cache import has_cache, keep_fewer
from memfit.records import Ledger, Option, Process
from memfit.step import Step

read_settings = reader({}, {"num_workers": at_least(0), "prefetch_factor": at_least(1), "pin_memory": is_bool, "cache": between(0, 1)})


class LoaderLever:
    """The same samples in the same order from fewer processes, or with fewer of them waiting."""

    name = "loader"
    exactness = "bitwise"
    needs = "Step(loader=…), a torch DataLoader with workers"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """No pinned copies, fewer batches fetched ahead, fewer workers, fewer samples kept: the mildest first."""
        return tuple(_options(ledger.process))

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """Bytes by worker and by waiting batch. The step's seconds do not hold the loading, so they stay as they are."""
        trace = trace_of(ledger)
        before = trace.process
        after = _changed(before, option.settings)
        if before.measured_bytes is not None:
            saved = before.base_bytes + before.workers_bytes - after.base_bytes - after.workers_bytes
            after = replace(after, measured_bytes=before.measured_bytes - saved)
        return rewritten(ledger, replace(trace, process=after))

    def apply(self, step: Step, option: Option) -> Undo:
        """Set the loader's own attributes: dataset, sampler, generator and everything else stay the same objects."""
        loader = step.loader
        if not isinstance(loader, DataLoader):
            raise CannotApply("This step has no torch DataLoader to change: hand it over as Step(…, loader=loader).")
        wanted = dict(option.settings)
        share = wanted.pop("cache", None)
        if share is not None and not has_cache(loader.dataset):
            raise CannotApply(
                f"{type(loader.dataset).__name__} has no cache of samples that memfit knows: lower it where the dataset is made."
            )
        if wanted.get("num_workers", loader.num_workers) != loader.num_workers:
            _refuse_other_samples(loader, option)
        if wanted.get("num_workers") == 0:
            wanted |= {"prefetch_factor": None, "persistent_workers": False}
        with Undo.or_nothing() as undo:
            _end_running_workers(loader, undo)
            for name, value in wanted.items():
                undo.then(_set, loader, name, getattr(loader, name))
                _set(loader, name, value)
            if share is not None:
                undo.then(keep_fewer(loader.dataset, share))
        return undo


class OneSeed:
    """Makes a loader's iterator in place of persistent workers, which draw one seed for all epochs where others draw one an epoch.

    Without it the sampler, which mostly shares the generator, would shuffle differently from the second epoch on.
    """

    def __init__(self, loader: DataLoader[Any], drawn: bool) -> None:
        self._loader, self._drawn = loader, drawn
        self._kept: Any = None

    def __call__(self) -> Any:
        """The iterator of an epoch."""
        if self._kept is not None:
            self._kept._reset(self._loader)
            return self._kept
        generator = self._loader.generator
        if self._drawn:
            self._loader.generator = torch.Generator()
        try:
            made = type(self._loader)._get_iterator(self._loader)
        finally:
            self._loader.generator = generator
        self._drawn = True
        if self._loader.num_workers == 0:
            self._kept = made
        return made

    def leave(self) -> None:
        """Give way to the loader's own; if its seed was drawn meanwhile, only after it has made one iterator more without."""
        self._kept = None
        if not self._drawn:
            del self._loader.__dict__["_get_iterator"]


def _options(process: Process) -> Iterator[Option]:
    exactness = "redrawn" if process.workers_draw else "bitwise"
    why = "samples draw random numbers, and each worker draws its own" if process.workers_draw else ""
    ahead, made_again = "1 batch fetched ahead", "samples that are not kept are made again, the same"
    if process.pinned_bytes:
        yield Option("loader", "no pinned memory", "bitwise", {"pin_memory": False}, "pinned copies lie beside the batches")
    if process.workers and process.prefetch > 1:
        yield Option("loader", ahead, "bitwise", {"prefetch_factor": 1}, f"each worker holds {process.prefetch}")
    if process.workers > 3:
        yield Option("loader", f"{process.workers // 2} workers", exactness, {"num_workers": process.workers // 2}, why)
    if process.workers > 1:
        yield Option("loader", "1 worker", exactness, {"num_workers": 1}, why)
    if process.workers > 1 and process.prefetch > 1:
        yield Option("loader", f"1 worker, {ahead}", exactness, {"num_workers": 1, "prefetch_factor": 1}, why)
    if process.cached_bytes:
        yield Option("loader", "half of the cache", "bitwise", {"cache": 0.5}, made_again)
    if process.workers:
        yield Option("loader", "no workers", exactness, {"num_workers": 0}, why)
    if process.cached_bytes:
        yield Option("loader", "no cache", "bitwise", {"cache": 0.0}, made_again)
    if process.workers and process.cached_bytes:
        yield Option("loader", "no workers, no cache", exactness, {"num_workers": 0, "cache": 0.0}, f"{made_again}; {why}".strip("; "))


def _end_running_workers(loader: DataLoader[Any], undo: Undo) -> None:
    """Persistent workers are as they were started: they end with their iterator, now and when the change is undone."""
    if loader.persistent_workers:
        seed = OneSeed(loader, drawn=loader._iterator is not None)
        _set(loader, "_get_iterator", seed)
        undo.then(seed.leave)
    undo.then(_set, loader, "_iterator", None)
    _set(loader, "_iterator", None)


def _changed(process: Process, settings: dict[str, Any]) -> Process:
    workers = settings.get("num_workers", process.workers)
    prefetch = settings.get("prefetch_factor", process.prefetch) if workers else 0
    one_worker = (process.workers_bytes - process.waiting_bytes) // max(1, process.workers)
    one_batch = process.waiting_bytes // max(1, process.workers * process.prefetch)
    waiting = workers * prefetch * one_batch
    dropped = int((1 - settings.get("cache", 1.0)) * process.cached_bytes)
    return replace(
        process,
        base_bytes=process.base_bytes - dropped,
        cached_bytes=process.cached_bytes - dropped,
        workers=workers,
        prefetch=prefetch,
        workers_bytes=workers * one_worker + waiting,
        waiting_bytes=waiting,
        pinned_bytes=waiting if process.pinned_bytes and settings.get("pin_memory", True) else 0,
        workers_draw=process.workers_draw and workers > 0,
    )


def _refuse_other_samples(loader: DataLoader[Any], option: Option) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise CannotApply(
            f"{type(loader.dataset).__name__} hands out its samples itself, by the number of workers, so another number would give other "
            "batches: keep the workers, and fetch fewer batches ahead."
        )
    if option.exactness == "bitwise" and draws_random_numbers(loader.dataset):
        raise CannotApply(
            f"{type(loader.dataset).__name__} draws random numbers for its samples, and another number of workers draws others: "
            "allow redrawn, or keep the workers."
        )


def _set(loader: DataLoader[Any], name: str, value: object) -> None:
    loader.__dict__[name] = value  # torch guards some of these names, for users
