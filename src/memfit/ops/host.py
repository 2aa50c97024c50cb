"""Tensors of a CUDA device copied to pinned host memory on a stream of their own. Not yet run on hardware."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from memfit.ops.spill import WAITING


class HostCopies:
    """The same promises as a Spill's: a tensor's memory is free at the latest when two more have been given."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: deque[HostCopy] = deque()

    def write(self, tensor: torch.Tensor, unchanged: Callable[[], object] = lambda: None) -> HostCopy:
        """Begin to copy a tensor; until it is let go nobody may write to it: `unchanged` raises if somebody did."""
        self._let_go(WAITING - 1)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        self._waiting.append(HostCopy(tensor.detach(), self._streams[tensor.device], unchanged))
        return self._waiting[-1]

    def _let_go(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().let_go()

    def settle(self) -> None:
        """What is computed from now on waits for the copies that are under way."""
        self._let_go(0)

    def close(self) -> None:
        """Nothing is left to do once nothing is under way."""
        self.settle()


class HostCopy:
    """A copy in host memory, or on its way there."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream, unchanged: Callable[[], object]) -> None:
        self._device, self._unchanged = tensor.device, unchanged
        self._copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
            self._done = stream.record_event()
        # Held, and let go in the order of the computing stream: so the allocator can give the memory away at once, and always at the
        # same moment. Told of the other stream instead, it would wait until it happens to see that the copy is over.
        self._tensor: torch.Tensor | None = tensor

    def let_go(self) -> None:
        """From here on the device's memory is free for whatever is computed after the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._unchanged()
        self._tensor = None

    def get(self) -> torch.Tensor:
        """Back on the device."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        return self._copy.to(self._device, non_blocking=True)
