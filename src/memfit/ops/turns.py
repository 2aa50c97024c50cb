"""What surrounds the parts of a batch as they run one after the other: the random numbers each of them meets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from memfit.ops.python_draws import PythonDraws
from memfit.ops.replay import Replay


class Turns:
    """`whole(number)` is entered around a part's loss and backward, `loss()` inside it around its loss.

    Without a replay nothing watches torch; `again` says that backward draws as well, because it recomputes.
    """

    def __init__(self, replay: Replay | None, again: bool) -> None:
        self._replay, self._again, self._python = replay, again, PythonDraws()

    @contextmanager
    def whole(self, number: int) -> Iterator[None]:
        """A part's turn."""
        with ExitStack() as entered:
            entered.enter_context(self._python.part())
            if self._replay is not None:
                entered.enter_context(self._replay.part(number))
                if self._again:
                    entered.enter_context(self._replay)
            yield

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Its loss."""
        with ExitStack() as entered:
            if self._replay is not None:
                entered.enter_context(self._replay.loss())
                if not self._again:
                    entered.enter_context(self._replay)
            yield
