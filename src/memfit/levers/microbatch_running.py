"""A step's batch taken in parts: slices, what each counts for, and the random numbers each meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from memfit.levers.drawn import drawn_from
from memfit.levers.lever import CannotApply
from memfit.ops.draws import NotReplayable
from memfit.ops.replay import Replay
from memfit.ops.turns import Turns
from memfit.step.batches import batch_size
from memfit.step.parts import checked_weight, is_simulated, lengths, shares, sliced
from memfit.step.running import Part
from memfit.step.samples import Places, has_samples_of_their_own_size


class Split:
    """What `Running.split` calls: a phase's name and a batch to its parts."""

    def __init__(
        self, size: int, batch: int, draws: dict[str, Any], again: bool, weight: Callable[[Any], float] | None, places: Places
    ) -> None:
        self._size, self._batch, self._weight, self._again, self._places = size, batch, weight, again, places
        self._draws = {phase: drawn_from(told) for phase, told in draws.items()}

    def __call__(self, phase: str, batch: Any) -> list[Part]:
        """The parts, in the order of the samples; those that count for nothing are left out."""
        total = batch_size(batch)
        if total <= self._size:
            return [Part(batch)]
        counts = lengths(total, self._size)
        run = list(range(len(counts)))
        alike = not phase and not has_samples_of_their_own_size(batch, total, self._places)
        if alike and is_simulated(batch):  # what one phase hands to the next is there for every part
            counts, run = _as_far_as_different(counts)
        starts = list(accumulate(counts, initial=0))
        pieces = [sliced(batch, total, starts[number], counts[number], self._places) for number in run]
        turns = Turns(Replay(self._draws[phase], self._batch, counts) if phase in self._draws else None, self._again)
        lengths_run = [counts[number] for number in run]
        weighed = shares([self._weight_of(*given) for given in zip(pieces, lengths_run, strict=True)], lengths_run)
        parts = zip(run, pieces, weighed, strict=True)
        return [Part(piece, share, _turn(turns, number), turns.loss) for number, piece, share in parts if share]

    def _weight_of(self, piece: Any, samples: int) -> float:
        if self._weight is None or is_simulated(piece):
            return float(samples)
        return checked_weight("Step.weight", self._weight(piece))


def _as_far_as_different(counts: list[int]) -> tuple[list[int], list[int]]:
    """Of thousands of parts, what a simulation has to see, and which of it run: the second finds gradients there, the last may be smaller.

    >>> _as_far_as_different([2, 2, 2, 2, 1])
    ([2, 2, 4, 1], [0, 1, 3])
    >>> _as_far_as_different([2, 1])
    ([2, 1], [0, 1])
    """
    if len(counts) < 4:
        return counts, list(range(len(counts)))
    return [*counts[:2], sum(counts[2:-1]), counts[-1]], [0, 1, 3]


def _turn(turns: Turns, number: int) -> Any:
    @contextmanager
    def around() -> Iterator[None]:
        try:
            with turns.whole(number):
                yield
        except NotReplayable as error:
            raise CannotApply(
                f"microbatch cannot give each micro-batch the whole batch's random numbers: {error}. "
                "Allow redrawn (the same distribution, other numbers), or leave out microbatch."
            ) from error

    return around
