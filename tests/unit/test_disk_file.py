"""What is put out of memory goes to a directory that is no memory itself, whoever puts it there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from memfit.capture.rollback import rolled_back
from memfit.ops.spill import Spill
from memfit.proof.shelf import Key, Shelf
from small_steps import dense

IN_MEMORY = "/dev/shm"


@pytest.fixture
def temporary_files_are_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.access(IN_MEMORY, os.W_OK):
        pytest.skip(f"{IN_MEMORY} is not there")
    monkeypatch.setattr(tempfile, "tempdir", IN_MEMORY)


def devices_of_open_files() -> Iterator[int]:
    for number in os.listdir("/proc/self/fd"):
        try:
            yield os.stat(f"/proc/self/fd/{number}").st_dev
        except FileNotFoundError:  # the listing's own
            continue


@pytest.mark.usefixtures("temporary_files_are_memory")
@pytest.mark.parametrize("what", ["rollback", "shelf", "spill"])
def test_what_waits_outside_of_memory_is_not_in_a_directory_that_is_memory(what: str) -> None:
    before = list(devices_of_open_files()).count(os.stat(IN_MEMORY).st_dev)
    if what == "rollback":
        with rolled_back(dense()):
            inside = list(devices_of_open_files())
    elif what == "shelf":
        shelf = Shelf()
        shelf.put(Key("gradients", "weight"), torch.ones(2))
        inside = list(devices_of_open_files())
    else:
        spill = Spill()
        inside = list(devices_of_open_files())
        spill.close()
    assert inside.count(os.stat(IN_MEMORY).st_dev) == before


def test_the_check_above_can_fail() -> None:
    with tempfile.TemporaryFile(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None) as file:
        assert os.fstat(file.fileno()).st_dev in list(devices_of_open_files())
