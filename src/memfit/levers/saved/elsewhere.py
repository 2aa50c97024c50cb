"""Where results wait that are put away: a file for those in the host's memory, the host's memory for those of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from memfit.levers.saved.table import DISK, HOST, PhaseTable
from memfit.ops.host import HostCopies
from memfit.ops.spill import Spill
from memfit.torch_private import FakeTensor


class Elsewhere:
    """Opened when the first result is put away."""

    def __init__(self) -> None:
        self._file: Spill | None = None
        self._host: HostCopies | None = None

    def write(self, tensor: torch.Tensor, do: str, unchanged: Callable[[], object]) -> Callable[[], torch.Tensor] | None:
        """What brings a tensor back; None where there is no other place for it.

        On a CPU the host's memory is where it is already. A simulated tensor stands for one of the device that was planned for, where
        both words mean another place, with the same waits.
        """
        if tensor.device.type == "cuda":
            self._host = self._host or HostCopies()
            return self._host.write(tensor, unchanged).get
        if tensor.device.type == "cpu" and (do == DISK or isinstance(tensor, FakeTensor)):
            self._file = self._file or Spill()
            return self._file.write(tensor, unchanged).get
        return None

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
