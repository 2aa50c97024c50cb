"""What a real step took of a CUDA device, by torch's own statistics of it. Not validated on hardware."""

from __future__ import annotations

import torch

from memfit.capture.loaders import Workers
from memfit.capture.process import CUDA_CONTEXT, HighWaterMark
from memfit.records import Process
from memfit.step import Step

UNVALIDATED = (
    "Peak and process are what torch.cuda's statistics say of the device, the process with a context as large as they commonly are; this "
    "is not validated on hardware."
)


class CudaMark(HighWaterMark):
    """The most torch took of a device while this was entered, and the context beside it; the process's own mark is the host's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.peak_bytes, self.host_bytes = device, 0, 0

    def __enter__(self) -> CudaMark:
        super().__enter__()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.host_bytes = self.bytes
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self.bytes = torch.cuda.max_memory_reserved(self._device) + CUDA_CONTEXT


def mark_of(step: Step) -> HighWaterMark:
    """The mark that a budget is about, where the step lives."""
    device = next((p.device for model in step.models.values() for p in model.parameters()), torch.device("cpu"))
    return CudaMark(device) if device.type == "cuda" else HighWaterMark()


def measured_process(mark: HighWaterMark, base: int, workers: Workers) -> Process:
    """A mark as a record; `base` is what the process held beside the step's own tensors. Loader workers are in the host's memory."""
    if isinstance(mark, CudaMark):
        host = mark.host_bytes + workers.bytes
        return Process(CUDA_CONTEXT, measured_bytes=mark.bytes, measured_peak_bytes=mark.peak_bytes, host_bytes=host)
    return Process(base, measured_bytes=mark.bytes + workers.bytes, **workers.of_process())
