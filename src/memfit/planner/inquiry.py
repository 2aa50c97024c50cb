"""Asking the integer programme for a table: solve, follow exactly, learn where the programme was wrong, solve again."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memfit.planner.evaluation import Evaluation, Outcome
from memfit.planner.programme import Programme

_ROUNDS = 10
_MOMENTS = 12  # the worst moments of a proposal that become limits of the next
_SOLVING = (0.2, 1.5)  # seconds, at least and at most


class Searching(Protocol):
    """What it needs of a search."""

    evaluation: Evaluation
    plain: Outcome

    @property
    def programme(self) -> Programme:
        """Of the search's line."""

    def tried(self, ops: dict[int, str]) -> tuple[object, Outcome]:
        """What a table gives."""

    def packed(self, ops: dict[int, str]) -> dict[int, str]:
        """A table with all masks in bits."""


class Inquiry:
    """For one limit, which the programme is asked to undercut; it can be left when time is short, and taken up again."""

    def __init__(self, search: Searching, aim: int, limit: int) -> None:
        self.search, self.aim, self.limit = search, aim, limit
        self.fits = False  # whether it led to a table under the limit
        self._rounds = _ROUNDS
        self._plain = np.concatenate([search.plain.alive[: len(search.plain.alive) // 2], search.evaluation.before])
        self._alive, self._error = search.plain.alive, np.zeros(len(search.plain.alive))
        self._moments: list[int] = []
        self._answers = set[frozenset[tuple[int, str]]]()

    def go_on(self, deadline: float) -> None:
        """Until a table fits, the programme has nothing new to say, or the time is over."""
        while self._rounds and not self.fits and time.thread_time() < deadline:
            self._moments = sorted({*self._moments, *_worst(self._alive, self.aim)})
            ops = self._solved(deadline)
            if ops is None:
                return  # more time may help
            answer = frozenset(ops.items())
            self._rounds = 0 if answer in self._answers else self._rounds - 1
            self._answers.add(answer)
            self._follow(ops)

    def _solved(self, deadline: float) -> dict[int, str] | None:
        excess = [float(self._plain[m] + self._error[m] - self.aim) for m in self._moments]
        least, most = _SOLVING
        return self.search.programme.solve(self._moments, excess, max(least, min(most, deadline - time.thread_time())))

    def _follow(self, ops: dict[int, str]) -> None:
        outcome = self.search.tried(self.search.packed(ops))[1]
        self.fits, self._alive = outcome.peak <= self.limit, outcome.alive
        for m in {*self._moments, *_worst(self._alive, self.aim)}:
            self._error[m] = float(self._alive[m] - self._plain[m] + self.search.programme.freed(ops, m))


def _worst(alive: NDArray[np.int64], limit: int) -> list[int]:
    """The highest moments above the limit that are not beside a higher one."""
    over = [int(m) for m in np.argsort(-alive) if alive[m] > limit]
    chosen: list[int] = []
    for m in over:
        if all(abs(m - other) > 3 for other in chosen):
            chosen.append(m)
        if len(chosen) == _MOMENTS:
            break
    return chosen
