"""Where results wait that are put away: a file for those in the host's memory, the host's memory for those of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from memfit.levers.saved.table import DISK, HOST, PhaseTable
from memfit.ops.host import HostCopies
from memfit.ops.spill import Spill
from memfit.step.running import Running

_PLACES = {"cpu": (DISK,), "cuda": (DISK, HOST)}  # memory that a device shares with its host has no other place


def has_place(device: str, do: str) -> bool:
    """Whether there is another place on this device for what is decided so; what is not put away needs none.

    >>> has_place("cpu", DISK), has_place("cpu", HOST), has_place("mps", DISK), has_place("mps", "recompute")
    (True, False, False, True)
    """
    return do not in (DISK, HOST) or do in _PLACES.get(device, ())


class Elsewhere:
    """Opened when the first result is put away."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._file: Spill | None = None
        self._host: HostCopies | None = None

    def write(self, tensor: torch.Tensor, do: str, unchanged: Callable[[], object]) -> Callable[[], torch.Tensor] | None:
        """What brings a tensor back; None where there is no other place for it.

        A simulated tensor is on its way to a file for as long as it would be to any place that the simulated device has.
        """
        simulated = self._running.simulated_on
        device = simulated or tensor.device.type
        if not has_place(device, do):
            return None
        if device == "cuda" and simulated is None:
            self._host = self._host or HostCopies()
            return self._host.write(tensor, unchanged).get
        self._file = self._file or Spill()
        return self._file.write(tensor, unchanged).get

    def settle(self) -> None:
        """Wait until all that was given is there, and its memory free."""
        for place in (self._file, self._host):
            if place is not None:
                place.settle()

    def close(self) -> None:
        """Forget everything."""
        for place in (self._file, self._host):
            if place is not None:
                place.close()


def puts_away(tables: Iterable[PhaseTable]) -> bool:
    """Whether any decision needs another place."""
    return any(decision.do in (DISK, HOST) for table in tables for decision in table.decisions)
