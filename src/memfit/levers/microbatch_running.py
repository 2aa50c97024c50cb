"""A step's batch taken in parts: slices, what each counts for, and the random numbers each meets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from memfit.batches import batch_size, map_tensors, tensors_in
from memfit.errors import MemfitError
from memfit.levers.drawn import drawn_from
from memfit.levers.lever import CannotApply
from memfit.ops.draws import NotReplayable
from memfit.ops.python_draws import PythonDraws
from memfit.ops.replay import Replay
from memfit.running import Part


class Split:
    """What `Running.split` calls: a phase's name and a batch to its parts."""

    def __init__(self, size: int, batch: int, draws: dict[str, Any], again: bool, weight: Callable[[Any], float] | None) -> None:
        self._size, self._batch, self._weight, self._again = size, batch, weight, again
        self._draws = {phase: drawn_from(told) for phase, told in draws.items()}

    def __call__(self, phase: str, batch: Any) -> Iterator[Part]:
        """The parts, in the order of the samples; those that count for nothing are left out."""
        total = batch_size(batch)
        if total <= self._size:
            return iter([Part(batch)])
        starts = range(0, total, self._size)
        lengths = [min(self._size, total - start) for start in starts]
        pieces = [sliced(batch, total, start, length) for start, length in zip(starts, lengths, strict=True)]
        turns = _Turns(Replay(self._draws[phase], self._batch, lengths) if phase in self._draws else None, self._again)
        shares = _shares([self._weight_of(piece) for piece in pieces], lengths)
        return iter(
            [
                Part(piece, share, lambda number=number: turns.whole(number), turns.loss)  # type: ignore[misc]
                for number, (piece, share) in enumerate(zip(pieces, shares, strict=True))
                if share
            ]
        )

    def _weight_of(self, piece: Any) -> float:
        """What a part counts for. A simulation knows no values, and memory does not depend on them."""
        if self._weight is None or any(isinstance(t, FakeTensor) for _, t in tensors_in(piece)):
            return float(batch_size(piece))
        weight = float(self._weight(piece))
        if not (math.isfinite(weight) and weight >= 0):
            raise MemfitError(f"Step.weight gave {weight} for a micro-batch: give what its mean is taken over, from 0 up.")
        return weight


class _Turns:
    """What surrounds the parts of one phase of one step."""

    def __init__(self, replay: Replay | None, again: bool) -> None:
        self._replay, self._again, self._python = replay, again, PythonDraws()

    @contextmanager
    def whole(self, number: int) -> Iterator[None]:
        with ExitStack() as entered:
            entered.enter_context(_explained())
            entered.enter_context(self._python.part())
            if self._replay is not None:
                entered.enter_context(self._replay.part(number))
                if self._again:
                    entered.enter_context(self._replay)
            yield

    @contextmanager
    def loss(self) -> Iterator[None]:
        with ExitStack() as entered:
            if self._replay is not None:
                entered.enter_context(self._replay.loss())
                if not self._again:
                    entered.enter_context(self._replay)
            yield


def sliced(batch: Any, total: int, start: int, length: int) -> Any:
    """A part of a nested batch: views of its tensors; numbers, other values and lists of them are shared by all parts.

    >>> import torch
    >>> sliced({"x": torch.arange(4), "t": torch.tensor(7), "names": ["a", "b", "c", "d"]}, 4, 1, 2)
    {'x': tensor([1, 2]), 't': tensor(7), 'names': ['a', 'b', 'c', 'd']}
    """
    return map_tensors(lambda t: t.narrow(0, start, length) if t.dim() and t.shape[0] == total else t, batch)


def _shares(weights: list[float], lengths: list[int]) -> list[float]:
    """What each part counts for, in all 1; a batch that counts for nothing at all is divided by its samples, as undivided it would run."""
    counted = weights if sum(weights) else [float(length) for length in lengths]
    return [weight / sum(counted) for weight in counted]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NotReplayable as error:
        raise CannotApply(
            f"microbatch cannot give each micro-batch the whole batch's random numbers: {error}. "
            "Allow redrawn (the same distribution, other numbers), or leave out microbatch."
        ) from error
