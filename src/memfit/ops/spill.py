"""Tensors written to a file by a thread of their own while the computation goes on, and read back when they are asked for."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from memfit.disk_file import file_on_a_disk
from memfit.torch_private import FakeTensor

WAITING = 2  # tensors on their way to another place at a time: more would be memory again


class Spill:
    """One unnamed file, gone when the process is, however it ends."""

    def __init__(self, directory: str | None = None) -> None:
        self._file = file_on_a_disk(directory)  # lives as long as the spill
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="memfit-spill")
        self._waiting: deque[Spilled] = deque()
        self._alive: weakref.WeakSet[Spilled] = weakref.WeakSet()
        self._end = 0

    def write(self, tensor: torch.Tensor, unchanged: Callable[[], object] = lambda: None) -> Spilled:
        """Begin to write a tensor; its memory is free when it is written, at the latest when two more have been given.

        Until then nobody may write to it: `unchanged` is called after it was written, and raises if somebody did; then `get` does.
        """
        self._let_go(WAITING - 1)
        if not self._alive:  # nobody will read what an earlier step wrote
            self._end = 0
        spilled = Spilled(self, self._end, tensor.detach(), unchanged)
        self._end += tensor.untyped_storage().nbytes()
        if not isinstance(tensor, FakeTensor):  # without values nothing is written, but the wait is the same
            spilled.written = self._writer.submit(self._write, spilled)
        self._waiting.append(spilled)
        self._alive.add(spilled)
        return spilled

    def _let_go(self, most: int) -> None:
        """Free what is written; the thread that computes does so, since torch counts what a thread frees as that thread's."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].is_written()):
            self._waiting.popleft().let_go()

    def settle(self) -> None:
        """Wait until all that was given is written, and its memory free."""
        self._let_go(0)

    def _write(self, spilled: Spilled) -> None:
        view, offset = spilled.bytes().data, spilled.offset
        while view:
            count = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[count:], offset + count
        spilled.check()

    def read(self, offset: int, into: np.ndarray[Any, Any]) -> None:
        """Fill a piece of memory from the file."""
        view = into.data
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise RuntimeError("memfit's spill file is shorter than what was written to it")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Forget everything."""
        self.settle()
        self._writer.shutdown()
        self._file.close()


class Spilled:
    """A tensor in the file, or on its way there."""

    def __init__(self, spill: Spill, offset: int, tensor: torch.Tensor, unchanged: Callable[[], object]) -> None:
        self._spill, self.offset = spill, offset
        self._tensor: torch.Tensor | None = tensor
        self._unchanged: Callable[[], object] | None = unchanged
        self._bytes, self._dtype = tensor.untyped_storage().nbytes(), tensor.dtype
        self._size, self._stride, self._start = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.written: Future[None] | None = None

    def bytes(self) -> np.ndarray[Any, Any]:
        """All of its memory, as bytes."""
        assert self._tensor is not None  # it is let go only after it was written
        return torch.empty(0, dtype=torch.uint8).set_(self._tensor.untyped_storage()).numpy()

    def is_written(self) -> bool:
        """Whether its memory is not needed any more."""
        return self.written is not None and self.written.done()

    def let_go(self) -> None:
        """Wait until it is written, then free its memory."""
        if self.written is not None:
            self.written.exception()  # waits; whoever asks for the tensor is told
        self._tensor = self._unchanged = None

    def check(self) -> None:
        """Raise if somebody has written to the tensor meanwhile."""
        if self._unchanged is not None:
            self._unchanged()

    def get(self) -> torch.Tensor:
        """The tensor, bit for bit, in the layout it had."""
        memory = torch.empty(self._bytes, dtype=torch.uint8)
        if self.written is not None:
            self.written.result()
            self._spill.read(self.offset, memory.numpy())
        return memory.view(self._dtype).as_strided(self._size, self._stride, self._start)
