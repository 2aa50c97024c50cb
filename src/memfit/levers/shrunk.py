"""Storages and ops of a trace as they would be with fewer samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.ops.convolutions import native_columns
from memfit.records import Op, Storage, Trace


@dataclass(frozen=True)
class Shrunk:
    """What grows with the batch, cut down to `samples` of it."""

    trace: Trace
    growing: frozenset[int]
    samples: int

    def share(self, count: int) -> int:
        """The part of a number that these samples have."""
        return count * self.samples // self.trace.batch_size

    def storage(self, number: int) -> Storage:
        """A storage made in the step."""
        storage = self.trace.storages[number]
        if self._is_loss(storage):
            return replace(storage, bytes=min(storage.bytes, 8))
        if number not in self.growing or storage.kind:
            return storage
        dim = next(d for d, length in enumerate(storage.shape) if length and length % self.trace.batch_size == 0)
        shape = (*storage.shape[:dim], self.share(storage.shape[dim]), *storage.shape[dim + 1 :])
        return replace(storage, bytes=self.share(storage.bytes), shape=shape)

    def _is_loss(self, storage: Storage) -> bool:
        """A loss may hold more than its one number; weighted, it is let go before backward."""
        return storage.born >= 0 and not storage.shape and not storage.kind and self.trace.ops[storage.born].phase == "forward"

    def op(self, op: Op) -> Op:
        """An op with what it takes inside for these samples."""
        if op.phase == "optimizer" or not self.growing.intersection((*op.inputs, *op.outputs)):
            return op
        alone = self._inside_convolution(op) if self.samples == 1 < self.trace.batch_size and self.trace.device == "cpu" else None
        inside = self.share(op.workspace) if alone is None else alone
        return replace(op, workspace=inside, workspace_error=self.share(op.workspace_error))

    def _inside_convolution(self, op: Op) -> int | None:
        """What a convolution takes for a single sample, if torch then takes another kernel."""
        backward = op.name.startswith("aten.convolution_backward.")
        if not (backward or op.name.startswith("aten.convolution.")) or len(op.inputs) < 2 + backward:
            return None
        shapes = [self.trace.storages[n].shape for n in (*op.inputs[backward : 2 + backward], (op.inputs if backward else op.outputs)[0])]
        if self.trace.storages[op.inputs[backward]].dtype != "float32" or not all(len(shape) > 3 for shape in shapes):
            return None
        columns = native_columns((1, *shapes[0][1:]), shapes[1], (1, *shapes[2][1:]), backward)
        return None if columns is None else 4 * columns
