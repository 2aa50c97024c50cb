"""The time line of one micro-batch, made from the whole batch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.ledger.proportional import proportional_storages
from memfit.ledger.timeline import last_op, live_bytes
from memfit.levers.drawn import draw_kind
from memfit.levers.shrunk import Shrunk
from memfit.records import Op, Storage, Trace


def micro_batch_line(trace: Trace, size: int, replays: bool) -> Trace:
    """Of the first micro-batch, which draws for all, and the second, which finds gradients there: the one with the higher peak."""
    growing = proportional_storages(trace)
    first = _Line(trace, growing, size, True, replays).made()
    second = _Line(trace, growing, min(size, trace.batch_size - size), False, replays).made()
    return max(second, first, key=lambda line: int(live_bytes(line).max()))


@dataclass(frozen=True)
class _Line:
    trace: Trace
    growing: frozenset[int]
    samples: int
    first: bool
    replays: bool

    def made(self) -> Trace:
        spans = {loss: (first, last) for loss, first, last in _spans(self.trace)}
        storages = [self._smaller(number, storage) for number, storage in enumerate(self.trace.storages)]
        added = [extra for number, storage in enumerate(self.trace.storages) for extra in self._beside(number, storage, spans)]
        ops = [self._of_samples(op) for op in self.trace.ops]
        if self.replays:
            for now, kind in self._draws():
                added.append(self._kept(now, kind, spans[ops[now].loss]))
                ops[now] = replace(ops[now], workspace=ops[now].workspace + self._inside_draw(now, kind))
        return replace(self.trace, ops=tuple(ops), storages=(*storages, *added), batch_size=self.samples)

    @cached_property
    def _shrunk(self) -> Shrunk:
        return Shrunk(self.trace, self.growing, self.samples)

    def _of_samples(self, op: Op) -> Op:
        smaller = self._shrunk.op(op)
        if smaller is op or op.seconds is None:
            return smaller
        return replace(smaller, seconds=op.seconds * self.samples / self.trace.batch_size)

    def _share(self, count: int) -> int:
        return self._shrunk.share(count)

    def _smaller(self, number: int, storage: Storage) -> Storage:
        if storage.kind == "gradients" and storage.born >= 0 and not self.first:
            return replace(storage, died=self._accumulated_at(number, storage))
        return self._shrunk.storage(number)

    def _accumulated_at(self, number: int, storage: Storage) -> int:
        """A gradient made by a later micro-batch is gone once it is added to the first one's."""
        for now in range(storage.born, last_op(storage, len(self.trace.ops)) + 1):
            op = self.trace.ops[now]
            if op.forward is None and op.inputs == (number,):
                return now
        return storage.born

    def _beside(self, number: int, storage: Storage, spans: dict[str, tuple[int, int]]) -> Iterator[Storage]:
        """What the other micro-batches have left: gradients, and what later phases get from them."""
        if storage.born < 0:
            return
        start, end = spans[self.trace.ops[storage.born].loss]
        if storage.kind == "gradients" and not self.first:
            yield replace(storage, born=start)
        elif number in self.growing and not storage.kind and last_op(storage, len(self.trace.ops)) > end:
            left = storage.bytes - self._share(storage.bytes)
            yield replace(storage, bytes=left, born=end if self.first else start)

    def _draws(self) -> Iterator[tuple[int, str]]:
        for now, op in enumerate(self.trace.ops):
            if op.phase == "forward" and op.outputs and (kind := draw_kind(op)):
                yield now, kind

    def _kept(self, now: int, kind: str, span: tuple[int, int]) -> Storage:
        drawn = self.trace.storages[self.trace.ops[now].outputs[-1]]
        whole = math.ceil(math.prod(drawn.shape) / 8) if kind in ("mask", "dropout") else drawn.bytes
        if self.first:
            return Storage(whole, now, span[1], shape=drawn.shape, dtype=drawn.dtype)
        left = whole - self._share(whole) if kind in ("mask", "dropout") and self._grows(now) else whole
        return Storage(left, span[0], span[1], shape=drawn.shape, dtype=drawn.dtype)

    def _inside_draw(self, now: int, kind: str) -> int:
        """A mask passes through a byte for each value: the whole batch's in the first micro-batch, its own in a later one."""
        if kind not in ("mask", "dropout"):
            return 0
        count = math.prod(self.trace.storages[self.trace.ops[now].outputs[-1]].shape)
        return count if self.first else 3 * (self._share(count) if self._grows(now) else count) // 2

    def _grows(self, now: int) -> bool:
        return self.trace.ops[now].outputs[-1] in self.growing


def _spans(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """For each loss, the first op of its forward and the last of its backward."""
    for loss in dict.fromkeys(op.loss for op in trace.ops):
        own = [now for now, op in enumerate(trace.ops) if op.loss == loss]
        apart = [now for now in own if trace.ops[now].phase != "optimizer"]
        yield loss, own[0], apart[-1] if apart else own[-1]
