"""chunk: what the loss runs through memfit.chunked is decoded and differentiated a few samples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from memfit.levers.chunk_line import Region, chunk_line, regions
from memfit.levers.divisible import is_divisible
from memfit.levers.drawn import are_draws_of_calls, drawn_from, draws_again_in_backward, draws_of, not_replayable
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.microbatch import sizes
from memfit.levers.reading import at_least, by_loss, is_bool, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option, Trace
from memfit.step import Step
from memfit.step.chunking import Chunking, chunking_by
from memfit.step.samples import Places
from memfit.units import format_bytes

read_settings = reader({"size": at_least(1), "batch": at_least(1), "draws": by_loss(are_draws_of_calls), "again": is_bool})


class Chunk:
    """Memory of one chunk, whatever the batch; the rest of the model still sees the whole batch."""

    name, exactness, needs = "chunk", "reordered", "a call of memfit.chunked in the loss"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """From the whole batch with a backward of its own down to one sample; none without a call of memfit.chunked."""
        trace = trace_of(ledger)
        found = regions(trace)
        if not found or not all(is_divisible(trace, region.first, region.last) for region in found):
            return []
        draws, why = _draws(trace)
        settings = {"batch": trace.batch_size, "draws": {} if why else draws, "again": draws_again_in_backward(trace)}
        kept = _kept_by(trace, found)
        return [self._option(size, settings, why, kept) for size in (trace.batch_size, *sizes(trace.batch_size))]

    def _option(self, size: int, settings: dict[str, Any], why: str, kept: int) -> Option:
        how = f"a chunk keeps its part of {size} and is differentiated at once" if size < settings["batch"] else "now it runs at once"
        words = f"memfit.chunked keeps {format_bytes(kept)} for the backward of {settings['batch']} samples; {how}"
        told = f"{words}; random numbers differ: {why}" if why else words
        return Option(self.name, f"chunks of {size}", "redrawn" if why else "reordered", {"size": size, **settings}, told)

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """One chunk's forward and backward inside the forward pass; its seconds are taken to be the same."""
        return rewritten(ledger, chunk_line(trace_of(ledger), option.settings["size"], replays=option.exactness == "reordered"))

    def apply(self, step: Step, option: Option) -> Undo:
        """Calls of memfit.chunked without a size of their own take chunks of the option's."""
        around_loss = step.running.around_loss
        if any(getattr(around, "__self__", None).__class__ is _Around for around in around_loss):
            raise CannotApply("chunk is already applied to this step: undo the first one, then apply another.")
        around = _Around(option.settings).entered
        with Undo.or_nothing() as undo:
            around_loss.append(around)
            undo.then(around_loss.remove, around)
        return undo


class _Around:
    """Around every loss: the size of its chunks, and what each of its calls draws."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._draws = {loss: [drawn_from(call) for call in calls] for loss, calls in settings["draws"].items()}
        self._places: dict[str, dict[int, tuple[int, Places]]] = {}

    def entered(self, loss: str) -> AbstractContextManager[None]:
        """For one loss."""
        settings = self._settings
        places = self._places.setdefault(loss, {})
        return chunking_by(Chunking(settings["size"], settings["batch"], self._draws.get(loss, ()), settings["again"], places))


def _kept_by(trace: Trace, found: Sequence[Region]) -> int:
    """What autograd keeps of what chunked calls make."""
    inside = {n for region in found for n in range(region.first, region.last + 1)}
    kept = {row.storage for row in trace.saved if row.op in inside and trace.storages[row.storage].born in inside}
    return sum(trace.storages[s].bytes for s in kept)


def _draws(trace: Trace) -> tuple[dict[str, list[Any]], str]:
    """For each loss the draws of its calls, in order, and why they cannot be replayed, if so."""
    found: dict[str, list[Any]] = {}
    why = ""
    for region in regions(trace):
        loss = trace.ops[region.first].loss
        found.setdefault(loss, []).append(draws_of(trace, region.first, region.last).get(loss, []))
        why = why or not_replayable(trace, region.first, region.last)
    return found, why
