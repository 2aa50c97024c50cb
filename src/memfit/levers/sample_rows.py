"""Draws for rows of several samples, (batch x time) by channels: whether each sample's rows follow one another."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import cached_property

import torch

from memfit.ledger.proportional import proportional_storages
from memfit.levers.operators import operator_named
from memfit.ops.draws import order_of
from memfit.records import Op, Storage, Trace

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding")
_COPIES = ("clone", "_to_copy", "copy_", "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "native_dropout")
_NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "_softmax", "_safe_softmax", "_log_softmax")
_KEEP_ROWS = frozenset((*_PRODUCTS, *_COPIES, *_NORMS, "sum", "mean", "amax", "amin", "var", "cumsum"))


class SampleRows:
    """Follows what a draw is for back to a tensor with a dimension for the samples, whose place among the others tells their order."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def alternate(self, now: int) -> bool:
        """Whether op `now` draws for rows of samples which may take turns, as they do where time comes before the batch."""
        return has_rows_alone(self._drawn_at(now), self._trace.batch_size) and not self.follow(now)

    def follow(self, now: int) -> bool:
        """Whether a sample's rows, if it is for rows that op `now` draws, come one after the other.

        Where another dimension is as long as the batch, only a part of the batch shows which of the two holds the samples.
        """
        count = rows_of_a_sample(self._drawn_at(now), self._trace.batch_size)
        drawn = self._trace.ops[now].outputs[-1]
        return not count or not any(self._may_alternate(met, count) for met in self._drawn_for(now, drawn))

    def _drawn_at(self, now: int) -> list[int]:
        return _as_in_memory(self._trace.storages[self._trace.ops[now].outputs[-1]])

    @cached_property
    def _growing(self) -> frozenset[int]:
        return proportional_storages(self._trace)

    def _drawn_for(self, now: int, drawn: int) -> frozenset[int]:
        """What the drawn tensor was made like, or else what it first meets of the batch."""
        made_at = self._trace.storages[drawn].born
        like = self._growing.intersection(self._trace.ops[made_at].inputs) if made_at >= 0 else frozenset()
        mine, met = {drawn}, set(like)
        for op in self._trace.ops[now + 1 :] if not like else ():
            if op.phase == "forward" and mine.intersection(op.inputs):
                others = self._growing.intersection(op.inputs) - mine
                met |= others
                mine |= set() if others else set(op.outputs)
        return frozenset(met)

    def _may_alternate(self, number: int, count: int) -> bool:
        waiting, seen = [number], set[int]()
        while waiting:
            number = waiting.pop()
            storage = self._trace.storages[number]
            if number in seen or storage.kind == "batch":
                continue
            seen.add(number)
            if _has_rows_before_samples(storage, count, self._trace.batch_size):
                return True
            if self._trace.batch_size not in storage.shape or count * self._trace.batch_size in storage.shape:
                before = self._rows_before(storage)
                if not before:
                    return True
                waiting.extend(before)
        return False

    def _rows_before(self, storage: Storage) -> frozenset[int]:
        """Of the op that made it, what came from the batch; nothing where the op may have put rows into another order."""
        op = self._trace.ops[storage.born] if storage.born >= 0 else None
        return self._growing.intersection(op.inputs) if op is not None and _keeps_rows(op) else frozenset()


def rows_of_a_sample(shape: Sequence[int], batch: int) -> int:
    """How many rows each sample has, if a dimension holds rows of samples.

    >>> rows_of_a_sample((28, 6), 4), rows_of_a_sample((4, 6), 4)
    (7, 0)
    """
    return next((length // batch for length in shape if length > batch and length % batch == 0), 0)


def has_rows_alone(shape: Sequence[int], batch: int) -> bool:
    """Whether there is a dimension for rows of samples, and none that is for samples alone.

    >>> has_rows_alone((28, 6), 4), has_rows_alone((7, 4, 8), 4)
    (True, False)
    """
    alone = batch in shape and (len(shape) > 2 or shape[0] == batch or shape[0] % batch)
    return not alone and rows_of_a_sample(shape, batch) > 0


def _as_in_memory(storage: Storage) -> list[int]:
    """The lengths of a tensor's dimensions, the outermost in memory first."""
    return [storage.shape[d] for d in order_of(storage.strides) or range(len(storage.shape))]


def _has_rows_before_samples(storage: Storage, count: int, batch: int) -> bool:
    """Whether the dimensions right before the samples', as they lie in memory, are as many as the rows of a sample.

    Other dimensions may by chance be as long as the batch. Where rows come first they hold the samples; where something as long as the
    batch comes first it is taken for them, unless what follows is as long, too: then either may be.
    """
    shape = _as_in_memory(storage)
    if not shape or shape[0] % (count * batch) == 0:
        return False
    if shape[0] == batch:
        return shape[1:2] == [batch] and count == batch
    places = [place for place, length in enumerate(shape) if length == batch]
    return any(count in itertools.accumulate(reversed(shape[:place]), operator.mul) for place in places)


def _keeps_rows(op: Op) -> bool:
    known = operator_named(op.name)
    return op.name.split(".")[1] in _KEEP_ROWS or (known is not None and torch.Tag.pointwise in known.tags)
