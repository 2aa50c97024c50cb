"""The time line of a step whose chunked calls are differentiated chunk by chunk, made from the line where they run whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.ledger.proportional import proportional_storages
from memfit.levers.drawn import draw_kind
from memfit.levers.shrunk import Shrunk
from memfit.records import Call, Op, Storage, Trace

MARK = "ChunkedCall"  # the module that memfit.chunked runs in


@dataclass(frozen=True)
class Region:
    """A chunked call: its forward ops, first to last, and the backward ops that belong to them."""

    first: int
    last: int
    backward: tuple[int, ...]


def regions(trace: Trace) -> list[Region]:
    """The chunked calls of a step that are differentiated."""
    found = []
    for call in trace.calls:
        if call.module.split(".")[-1] == MARK:
            backward = [
                n
                for n, op in enumerate(trace.ops)
                if op.phase == "backward" and _is_of(call, op) and not _adds_to_the_rest(trace, call, op)
            ]
            if backward:
                found.append(Region(call.first, call.last, tuple(backward)))
    return sorted(found, key=lambda region: region.first)


def _is_of(call: Call, op: Op) -> bool:
    return op.forward is not None and call.first <= op.forward <= call.last


def _adds_to_the_rest(trace: Trace, call: Call, op: Op) -> bool:
    """Whether a gradient that leaves the call is added to one that the rest of the step has made: that happens when it is handed on."""
    if op.name != "aten.add_.Tensor":
        return False
    born = trace.storages[op.outputs[0]].born
    return not call.first <= born <= call.last and not (born >= 0 and _is_of(call, trace.ops[born]))


def chunk_line(trace: Trace, size: int, replays: bool) -> Trace:
    """Each region's backward right after its forward, both of one chunk; its gradients wait until the rest is differentiated."""
    growing, samples = proportional_storages(trace), min(size, trace.batch_size)
    for number in range(len(regions(trace))):  # moving one moves the numbers of the others
        trace = _Moved(trace, regions(trace)[number], Shrunk(trace, growing, samples), replays).made()
    return trace


@dataclass(frozen=True)
class _Moved:
    trace: Trace
    region: Region
    shrunk: Shrunk
    replays: bool

    @cached_property
    def inside(self) -> frozenset[int]:
        return frozenset((*range(self.region.first, self.region.last + 1), *self.region.backward))

    @cached_property
    def order(self) -> list[int]:
        """The ops' old numbers in their new order."""
        moved = frozenset(self.region.backward)
        after = [n for n in range(self.region.last + 1, len(self.trace.ops)) if n not in moved]
        return [*range(self.region.last + 1), *self.region.backward, *after]

    @cached_property
    def new(self) -> dict[int, int]:
        return {old: now for now, old in enumerate(self.order)}

    @cached_property
    def end(self) -> int:
        """The last op of a chunk, by its new number."""
        return self.region.last + len(self.region.backward)

    @cached_property
    def handed_on(self) -> int:
        """Where the rest's backward takes over the gradients, by its new number."""
        later = (n for n in self.order[self.end + 1 :] if n > self.region.backward[0])
        return self.new[next(later, self.order[-1])]

    @cached_property
    def end_of_forward(self) -> int:
        loss = self.trace.ops[self.region.first].loss
        own = [n for n, op in enumerate(self.trace.ops) if (op.phase, op.loss) == ("forward", loss)]
        return self.new[own[-1]]

    def made(self) -> Trace:
        ops = [self._op(self.trace.ops[old], old) for old in self.order]
        storages = [self._storage(number) for number in range(len(self.trace.storages))]
        added = [extra for number in range(len(self.trace.storages)) for extra in self._beside(number)]
        for old, kind in self._draws():
            kept, inside = self._drawn(old, kind)
            added.append(kept)
            ops[self.new[old]] = replace(ops[self.new[old]], workspace=ops[self.new[old]].workspace + inside)
        return replace(
            self.trace,
            ops=tuple(ops),
            storages=(*storages, *added),
            saved=tuple(replace(s, op=self.new[s.op], read=self.new.get(s.read) if s.read is not None else None) for s in self.trace.saved),
            calls=tuple(Call(call.module, self.new[call.first], self.new[call.last]) for call in self.trace.calls),
        )

    def _op(self, op: Op, old: int) -> Op:
        smaller = self.shrunk.op(op) if old in self.inside else op
        return replace(smaller, forward=None if op.forward is None else self.new[op.forward])

    def _died(self, storage: Storage) -> int | None:
        return None if storage.died is None else self.new.get(storage.died, storage.died)

    def _storage(self, number: int) -> Storage:
        storage = self.trace.storages[number]
        if storage.born not in self.inside:
            return self._from_outside(storage)
        if self._is_handed_on(storage):
            return replace(storage, born=self.handed_on, died=self._died(storage))
        smaller = self.shrunk.storage(number)
        born, died = self.new[storage.born], self._died(storage)
        return replace(smaller, born=born, died=died if died is None else max(born, died))

    def _from_outside(self, storage: Storage) -> Storage:
        """What the region reads is held by the loss until that returns, even if the region's backward was its last use."""
        died = self._died(storage)
        if storage.died in self.region.backward and died is not None:
            died = max(died, self.end_of_forward)
        return replace(storage, born=self.new.get(storage.born, storage.born), died=died)

    def _is_handed_on(self, storage: Storage) -> bool:
        """A gradient that leaves the region: the rest's backward goes on from it, or an optimizer takes it."""
        return storage.born in self.region.backward and (storage.died is None or storage.died not in self.inside)

    def _beside(self, number: int) -> Iterator[Storage]:
        """A gradient that leaves the region is made chunk by chunk and added up."""
        storage = self.trace.storages[number]
        if storage.born in self.inside and self._is_handed_on(storage):
            yield replace(self.shrunk.storage(number), kind="", born=self.new[storage.born], died=self.end)
            yield replace(storage, born=self.region.first, died=self.handed_on)

    def _draws(self) -> Iterator[tuple[int, str]]:
        for old in range(self.region.first, self.region.last + 1) if self.replays else ():
            if self.trace.ops[old].outputs and (kind := draw_kind(self.trace.ops[old])):
                yield old, kind

    def _drawn(self, old: int, kind: str) -> tuple[Storage, int]:
        """What is kept of a draw for all chunks, and what drawing it takes inside."""
        drawn = self.trace.storages[self.trace.ops[old].outputs[-1]]
        count = math.prod(drawn.shape)
        masks = kind in ("mask", "dropout")
        kept = Storage(math.ceil(count / 8) if masks else drawn.bytes, self.region.first, self.end, shape=drawn.shape, dtype=drawn.dtype)
        return kept, count if masks else 0
