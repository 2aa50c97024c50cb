"""Tensors of a device copied to pinned host memory on a stream of their own. Written for CUDA; not yet run on hardware."""

from __future__ import annotations

from typing import ClassVar

import torch


class OnHost:
    """A copy in host memory; the device's memory is free once the copy is done."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self._copy.copy_(tensor)
            return
        stream = self._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)

    def get(self) -> torch.Tensor:
        """Back on the device."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_stream(self._streams[self._device])
        return self._copy.to(self._device, non_blocking=True)

    @classmethod
    def settle(cls, device: torch.device) -> None:
        """What is computed from now on waits for the copies that are under way."""
        if device in cls._streams:
            torch.cuda.current_stream(device).wait_stream(cls._streams[device])
