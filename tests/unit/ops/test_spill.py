"""The spill: bits and layout come back, the file is nobody's, and it does not grow from step to step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.ops.remaking import Kept
from memfit.ops.spill import Spill

TENSORS = {
    "float": torch.randn(5, 7),
    "half": torch.randn(33).bfloat16(),
    "odd numbers": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    "whole": torch.arange(9).view(3, 3),
    "truth": torch.tensor([True, False, True]),
    "transposed": torch.randn(4, 6).t(),
    "strided": torch.randn(8, 8)[1::2, ::3],
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bits_and_layout_come_back(name: str, tmp_path: Path) -> None:
    spill, tensor = Spill(str(tmp_path)), TENSORS[name]
    first, other = spill.write(tensor), spill.write(torch.ones(3))
    for back in (first.get(), first.get()):
        assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert torch.equal(other.get(), torch.ones(3))
    spill.close()


def size(spill: Spill) -> int:
    spill.settle()
    return os.fstat(spill._file.fileno()).st_size


def test_the_file_does_not_grow_from_step_to_step(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    for _ in range(5):
        held = [spill.write(torch.ones(100)) for _ in range(3)]
        assert all(torch.equal(one.get(), torch.ones(100)) for one in held)
        assert size(spill) == 1200
        del held
        spill.settle()
    spill.close()


def test_what_is_still_asked_for_is_not_written_over(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    first = spill.write(torch.ones(100))
    second = spill.write(torch.zeros(100))
    assert torch.equal(first.get(), torch.ones(100)) and torch.equal(second.get(), torch.zeros(100))
    spill.close()


def test_memory_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    spill, tensor = Spill(str(tmp_path)), torch.ones(4)
    kept = Kept(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spill.write(tensor, kept.get).get()
    spill.settle()  # its place in the queue is free again
    assert torch.equal(spill.write(torch.ones(2)).get(), torch.ones(2))
    spill.close()


def test_no_file_is_left_not_even_by_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from memfit.ops.spill import Spill; spill = Spill(sys.argv[1]); held = spill.write(torch.ones(1000)); "
        "spill.settle(); print('written', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "written\n"
    assert list(tmp_path.iterdir()) == []  # it has no name even while it is used
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.communicate()
    assert list(tmp_path.iterdir()) == []
