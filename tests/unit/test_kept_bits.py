"""Bits that wait in a file come back, and what was not changed is not written to."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step
from memfit.kept_bits import bits_restored

MIB = 2**20

PROFILE = """
import sys, numpy as np, torch, memfit
net = torch.nn.Linear(4, 1)
x = torch.from_numpy(np.load(sys.argv[1], mmap_mode="r"))
print(memfit.profile(memfit.Step(net, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), x)).peak_bytes)
"""


def saved_batch(folder: Path) -> Path:
    np.save(folder / "x.npy", np.ones((2, 4), dtype=np.float32))
    return folder / "x.npy"


def test_a_batch_in_memory_that_nobody_may_write_to_is_measured(tmp_path: Path) -> None:
    """In a process of its own, since a write there ends it."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PROFILE, saved_batch(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0 and int(ran.stdout) > 0, ran.stderr


def test_a_file_that_a_batch_is_mapped_from_is_not_written_to(tmp_path: Path) -> None:
    net, path = nn.Linear(4, 1), saved_batch(tmp_path)
    mapped = np.load(path, mmap_mode="r+")
    before = path.stat().st_mtime_ns
    memfit.profile(Step(net, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.from_numpy(mapped)))
    mapped.flush()
    assert path.stat().st_mtime_ns == before
    mapped[0, 0] = 2
    mapped.flush()
    assert path.stat().st_mtime_ns > before  # a write shows


def test_every_piece_of_a_large_tensor_comes_back_without_a_second_copy_in_memory() -> None:
    tensor = torch.arange(8 * MIB + 3, dtype=torch.int32)
    before = tensor.clone()
    tracemalloc.start()
    with bits_restored([tensor.untyped_storage(), torch.empty(0).untyped_storage()]):
        tensor[[0, 5 * MIB + 1, -1]] = -1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(tensor, before) and peak < 8 * MIB


def test_memory_that_was_let_go_is_there_again() -> None:
    tensor = torch.arange(5.0)
    with pytest.raises(ZeroDivisionError), bits_restored([tensor.untyped_storage()]):
        tensor.untyped_storage().resize_(0)
        raise ZeroDivisionError
    assert tensor.tolist() == [0, 1, 2, 3, 4]
