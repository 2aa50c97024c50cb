"""What a proof's runs of the plain step are predicted to take, on all samples or on fewer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from memfit.errors import MemfitError
from memfit.profiling import profile
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.noise import Coins, outputs_moved
from memfit.proof.sampling import first_samples
from memfit.records import Ledger
from memfit.restoring import held_tensors
from memfit.step import Step
from memfit.step.batches import tensors_in

IN_FLOAT64, MOVED = ("reordered",), ("reordered", "rounded", "altered")  # the classes whose rules ask for such a run


class Needs:
    """Of one step, for a class of exactness; every size is simulated once, when it is first asked for.

    All of a step's batches but the first are copies, of which one is there at a time.
    """

    def __init__(self, step: Step, exactness: str, plain: Ledger | None = None) -> None:
        self._step, self._ledgers = step, {step.batch_size: plain} if plain else {}
        self._held = _bytes(t for t in held_tensors(step) if t.layout is torch.strided) if exactness in IN_FLOAT64 else 0
        self.is_moved = exactness in MOVED

    def ledger(self, size: int) -> Ledger:
        """The step as it is, without the batches of later steps."""
        if size not in self._ledgers:
            self._ledgers[size] = profile(cut_to(self._step, size), simulate=True)
        return self._ledgers[size]

    def copy(self, size: int) -> int:
        """Bytes of a later step's batch."""
        return _bytes(t for _, t in tensors_in(cut_to(self._step, size).batch))

    def plain(self, size: int) -> int:
        """The step as it is."""
        return self.ledger(size).process_high_bytes + self.copy(size)

    def at_most(self, size: int) -> int:
        """The largest of its runs: in float64, beside the values that are put back, or moved by noise, with what ops keep of both."""
        if not self.is_moved:
            return self.plain(size)
        return self.plain(size) + self.ledger(size).high_bytes + self._held

    def in_file(self, size: int) -> int:
        """With what autograd keeps in a file, as it is or moved."""
        fewer = cut_to(self._step, size)
        with kept_in_file(fewer), outputs_moved(Coins()) if self.is_moved else nullcontext():
            return profile(fewer, simulate=True).process_high_bytes + self.copy(size)

    def sizes(self, limit: int) -> Iterator[int]:
        """The whole batch, then halves of it for as long as its loss takes so few; those that samples alone would fill are left out."""
        whole = self._step.batch_size
        base = self.ledger(whole).process.base_bytes
        for halvings in range(whole.bit_length()):
            size = whole // 2**halvings
            if size not in (whole, 1) and base + (self.plain(whole) - base) * size // whole > limit:
                continue  # not worth a simulation
            if not self._is_taken(size):
                return
            yield size

    def _is_taken(self, size: int) -> bool:
        """Whether the loss takes fewer samples: one that has none does not."""
        try:
            self.ledger(size)
        except MemfitError:
            raise
        except Exception:
            if size == self._step.batch_size:
                raise
            return False
        return True


def cut_to(step: Step, size: int) -> Step:
    """The step on its first samples."""
    return replace(step, batch=first_samples(step.batch, size, step.running.places))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
