"""Shared by all tests: small steps of many kinds, and a cache of their own."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch

# Started in the background of a shell, tests would ignore Ctrl-C, and so would the programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workspaces measured by tests are kept for the whole run, apart from the user's own.
os.environ["MEMFIT_CACHE"] = tempfile.mkdtemp(prefix="memfit-tests-")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
