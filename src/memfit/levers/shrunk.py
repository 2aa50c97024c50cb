"""Storages and ops of a trace as they would be with fewer samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from memfit.ops.convolutions import fixed_part, native_columns
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
        """A storage made in the step, or the batch itself, which stays whole while a part of its rows is used."""
        storage = self.trace.storages[number]
        if self._is_loss(storage):
            return replace(storage, bytes=min(storage.bytes, 8))
        if number not in self.growing:
            return storage
        dim = next(d for d, length in enumerate(storage.shape) if length and length % self.trace.batch_size == 0)
        shape = (*storage.shape[:dim], self.share(storage.shape[dim]), *storage.shape[dim + 1 :])
        return replace(storage, bytes=storage.bytes if storage.kind else self.share(storage.bytes), shape=shape)

    def _is_loss(self, storage: Storage) -> bool:
        """A loss may hold more than its one number; weighted, it is let go before backward."""
        return storage.born >= 0 and not storage.shape and not storage.kind and self.trace.ops[storage.born].phase == "forward"

    def op(self, op: Op) -> Op:
        """An op with what it takes inside for these samples."""
        if op.phase == "optimizer" or not self.growing.intersection((*op.inputs, *op.outputs)):
            return op
        inside = self._inside_convolution(op) if self.trace.device == "cpu" and self.samples < self.trace.batch_size else None
        return replace(op, workspace=self.share(op.workspace) if inside is None else inside, workspace_error=self.share(op.workspace_error))

    def _inside_convolution(self, op: Op) -> int | None:
        """What a convolution takes inside, which is not in proportion to the samples; None for any other op."""
        backward = op.name.startswith("aten.convolution_backward.")
        if not (backward or op.name.startswith("aten.convolution.")) or len(op.inputs) < 2 + backward:
            return None
        given, weight = (self.trace.storages[n] for n in op.inputs[backward : 2 + backward])
        output = self.trace.storages[op.inputs[0] if backward else op.outputs[0]]
        if not all(len(storage.shape) > 3 for storage in (given, weight, output)):
            return None
        if self.samples == 1 and given.dtype == "float32":
            made = {math.prod(self.trace.storages[n].shape) for n in op.outputs} if backward else set()
            wanted = [math.prod(storage.shape) in made for storage in (given, weight)]
            columns = native_columns((1, *given.shape[1:]), weight.shape, (1, *output.shape[1:]), *wanted)
            if columns is not None:
                return 4 * columns
        fixed = fixed_part(op.workspace, given.shape, weight.shape, output.shape, getattr(torch, given.dtype).itemsize)
        return fixed + self.share(op.workspace - fixed)
