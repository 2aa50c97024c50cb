"""Marks by device. What torch.cuda says can only be asked where there is one; how it becomes a record is looked at here."""

from __future__ import annotations

import torch

from memfit.capture.cuda_mark import CudaMark, mark_of, measured_process
from memfit.capture.loaders import Workers
from memfit.capture.process import CUDA_CONTEXT, HighWaterMark
from small_steps import dense

MIB = 2**20
WORKERS = Workers(2, 50 * MIB, waiting_bytes=MIB, prefetch=2)


def test_on_a_cpu_the_mark_is_the_systems() -> None:
    mark = mark_of(dense())
    assert type(mark) is HighWaterMark
    mark.bytes = 300 * MIB
    process = measured_process(mark, 200 * MIB, WORKERS)
    assert (process.base_bytes, process.measured_bytes, process.workers_bytes) == (200 * MIB, 350 * MIB, 50 * MIB)
    assert process.measured_peak_bytes is None and process.host_bytes == 0


def test_on_cuda_it_is_the_devices_and_workers_are_the_hosts() -> None:
    mark = CudaMark(torch.device("cuda"))
    mark.bytes, mark.peak_bytes, mark.host_bytes = 700 * MIB, 150 * MIB, 900 * MIB
    process = measured_process(mark, 800 * MIB, WORKERS)
    assert (process.base_bytes, process.measured_bytes, process.measured_peak_bytes) == (CUDA_CONTEXT, 700 * MIB, 150 * MIB)
    assert process.host_bytes == 950 * MIB and process.workers == process.workers_bytes == 0
