"""What the operating system sees: measured by it, and predicted before."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit import Step
from memfit.capture import loaders
from memfit.capture.allocations import Allocations
from memfit.capture.heap import heap_slack
from memfit.capture.loaders import loader_workers
from memfit.capture.process import HighWaterMark, base_bytes, memory_left, resident_bytes
from small_steps import convolutional_3d, dense

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="replays through glibc's malloc")
MIB = 2**20


def test_the_high_water_mark_sees_memory_that_came_and_went() -> None:
    before = resident_bytes()
    with HighWaterMark() as quiet:
        pass
    with HighWaterMark() as busy:
        torch.ones(64 * MIB // 4).sum()
    assert busy.bytes - quiet.bytes > 60 * MIB
    assert abs(quiet.bytes - before) < 32 * MIB


def test_the_room_of_a_process_is_the_machines_or_its_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    room = memory_left()
    assert resident_bytes() < room <= psutil.virtual_memory().total + resident_bytes()
    monkeypatch.setattr("memfit.capture.process.room_in_cgroups", lambda held: 64 * MIB)
    assert memory_left() == 64 * MIB


def test_the_base_leaves_out_the_steps_own_tensors() -> None:
    without = base_bytes(dense())
    net = nn.Linear(4096, 4096)  # 64 MiB
    step = Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 4096))
    net.weight.data.fill_(1.0)
    assert abs(base_bytes(step) - without) < 16 * MIB


def line(*sizes: int) -> Allocations:
    """Blocks that come one after the other and go in another order, so that the heap has holes."""
    born = [(number, size) for number, size in enumerate(sizes)]
    gone = [(number, 0) for number in (*range(0, len(sizes), 2), *range(1, len(sizes), 2))]
    return Allocations((), (), (*born, *gone))


@GLIBC
def test_blocks_of_their_own_mapping_leave_no_slack_and_heap_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    mapped = heap_slack(line(*[8 * MIB] * 20))
    assert mapped.likely < MIB and mapped.high < 2 * MIB
    in_heap = heap_slack(line(*[MIB // 2] * 320))
    assert in_heap.low == 0 < in_heap.likely < in_heap.high
    assert in_heap.likely > 10 * MIB


@GLIBC
def test_the_same_step_takes_the_same_in_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment lies in the replay's heap, too: this one made 851 MiB of 352."""
    found = []
    for size in (0, 700, 30_000):
        monkeypatch.setenv("SOMEBODYS_OWN", "y" * size)
        found.append(heap_slack(line(*[16 * MIB] * 20)).high)
    assert max(found) - min(found) < MIB  # pages of a heap do not always begin alike


def test_the_peak_of_allocations_is_the_ledgers() -> None:
    ledger = memfit.profile(convolutional_3d(), simulate=True)
    assert ledger.trace is not None
    assert Allocations.of(ledger.trace).peak == ledger.peak_bytes


def test_every_block_is_given_back_once_and_the_states_come_late() -> None:
    trace = memfit.profile(dense(), simulate=True).trace
    assert trace is not None
    found = Allocations.of(trace)
    live: dict[int, int] = {}
    for block, size in found.line:
        assert (block in live) == (size == 0)
        if size:
            live[block] = size
        else:
            del live[block]
    assert not live
    assert sum(size for _, size in found.late) == sum(s.bytes for s in trace.storages if s.kind == "optimizer")
    assert len(list(found.steps(3))) == len(found.fixed) + len(found.late) + 3 * len(found.line)


def test_cuda_reserves_whole_segments() -> None:
    ledger = memfit.profile(convolutional_3d(), simulate=True, device="cuda")
    assert (ledger.process.slack_bytes + ledger.peak_bytes) % (2 * MIB) == 0
    assert ledger.process_low_bytes < ledger.process_bytes < ledger.process_high_bytes


class Heavy(torch.utils.data.Dataset[Any]):
    """Each worker makes 40 MiB of its own when it first reads."""

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full((10 * MIB,), float(os.getpid()))
        return torch.full((16,), float(index))


def test_loader_workers_are_weighed_and_stopped() -> None:
    children = {c.pid for c in psutil.Process().children()}
    found = loader_workers(DataLoader(Heavy(), batch_size=4, num_workers=2, pin_memory=False))
    assert found.count == 2
    assert 2 * 40 * MIB < found.bytes < 2 * 40 * MIB + 600 * MIB
    assert {c.pid for c in psutil.Process().children()} <= children
    assert loader_workers(DataLoader(Heavy(), batch_size=4)).bytes == 0
    assert loader_workers(None).count == loader_workers([torch.ones(2)]).bytes == 0


def test_a_loader_gives_the_same_samples_after_it_was_weighed() -> None:
    def order(weighed: bool) -> list[float]:
        torch.manual_seed(7)
        loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True, num_workers=1)
        if weighed:
            loader_workers(loader)
        return [float(x) for (batch,) in loader for x in batch]

    assert order(weighed=True) == order(weighed=False)


class Shuffled(torch.utils.data.Sampler[int]):
    """Draws from NumPy, from Python and from generators of its own."""

    def __init__(self) -> None:
        self.torchs, self.pythons, self.numpys = torch.Generator(), random.Random(1), np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        torch.randperm(12, generator=self.torchs)
        self.pythons.random()
        self.numpys.random()
        order = list(range(12))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 12


def test_a_sampler_draws_what_it_would_have_drawn_after_it_was_weighed() -> None:
    def states() -> list[Any]:
        drawn = [sampler.pythons.getstate(), sampler.numpys.bit_generator.state, random.getstate(), np.random.get_state()[1].tolist()]
        return [*drawn, sampler.torchs.get_state().tolist()]

    sampler = Shuffled()
    batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_sampler=batches, num_workers=1)
    before = states()
    next(iter(loader))
    assert all(was != now for was, now in zip(before, states(), strict=True))  # it does draw from each
    before = states()
    loader_workers(loader)
    assert states() == before


def test_workers_are_started_once_for_each_setting_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    weighed = loaders._weighed
    monkeypatch.setattr(loaders, "_weighed", lambda loader, cached: started.append(loader.num_workers) or weighed(loader, cached))
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4, num_workers=2)
    assert loader_workers(loader) == loader_workers(loader) and started == [2]
    loader.__dict__["num_workers"] = 1  # as the loader lever sets it
    assert loader_workers(loader).count == 1 and started == [2, 1]
    assert loader_workers(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4, num_workers=1)).count == 1 and started == [2, 1, 1]


@pytest.mark.parametrize("simulate", [True, False])
def test_workers_count_in_the_process(simulate: bool) -> None:
    net = nn.Linear(16, 4)
    loader = DataLoader(Heavy(), batch_size=4, num_workers=1)
    step = Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 16), loader=loader)
    ledger = memfit.profile(step, simulate=simulate)
    assert ledger.process.workers == 1 and ledger.process.workers_bytes > 40 * MIB
    assert ledger.process_bytes > ledger.peak_bytes + ledger.process.workers_bytes
