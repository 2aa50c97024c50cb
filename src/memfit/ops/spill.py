"""Tensors written to a file by a thread of their own while the computation goes on, and read back when they are asked for."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

_WAITING = 2  # tensors on their way to the file at a time: more would be memory again


class Spill:
    """One unnamed file, gone when the process is, however it ends."""

    def __init__(self, directory: str | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory, prefix="memfit-")  # noqa: SIM115  # lives as long as the spill
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="memfit-spill")
        self._slots = BoundedSemaphore(_WAITING)
        self._end = 0
        self._asked_for: WeakSet[Spilled] = WeakSet()  # what somebody may still read
        self._simulated: deque[torch.Tensor] = deque(maxlen=_WAITING)  # without values nothing is written, but the wait is the same

    def write(self, tensor: torch.Tensor, unchanged: Callable[[], object] = lambda: None) -> Spilled:
        """Begin to write a tensor; its memory is free as soon as the thread is done with it, and until then nobody may write to it.

        `unchanged` is called after the write, and raises if somebody did: then `get` does.
        """
        if isinstance(tensor, FakeTensor):
            self._simulated.append(tensor.detach())
            return Spilled(self, 0, tensor)
        self._slots.acquire()
        if not self._asked_for:
            self._end = 0  # a new step writes over the one before it, or the file would grow for ever
        spilled = Spilled(self, self._end, tensor)
        self._asked_for.add(spilled)
        self._end += tensor.untyped_storage().nbytes()
        spilled.written = self._writer.submit(self._write, spilled, tensor.detach(), unchanged)
        return spilled

    def _write(self, spilled: Spilled, tensor: torch.Tensor, unchanged: Callable[[], object]) -> None:
        try:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            view, offset = whole.data, spilled.offset
            while view:
                count = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[count:], offset + count
            unchanged()
        finally:
            self._slots.release()

    def settle(self) -> None:
        """Wait until all that was given is written, and its memory free."""
        for _ in range(_WAITING):
            self._slots.acquire()
        for _ in range(_WAITING):
            self._slots.release()
        self._simulated.clear()

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
        self._writer.shutdown(cancel_futures=True)
        self._file.close()


class Spilled:
    """A tensor in the file: everything but its values."""

    def __init__(self, spill: Spill, offset: int, tensor: torch.Tensor) -> None:
        self._spill, self.offset = spill, offset
        self._bytes, self._dtype = tensor.untyped_storage().nbytes(), tensor.dtype
        self._size, self._stride, self._start = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.written: Future[None] | None = None

    def get(self) -> torch.Tensor:
        """The tensor, bit for bit, in the layout it had."""
        memory = torch.empty(self._bytes, dtype=torch.uint8)
        if self.written is not None:
            self.written.result()
            self._spill.read(self.offset, memory.numpy())
        return memory.view(self._dtype).as_strided(self._size, self._stride, self._start)
