"""What takes a lever off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.step.running import WholeExit, interrupts_held_back


class Undo:
    """Called once, it restores everything an `apply` changed, last change first; called again, it does nothing. Ctrl-C waits.

    >>> values = [1]
    >>> undo = Undo()
    >>> values.append(2); undo.then(values.pop)
    >>> undo(); undo(); values
    [1]
    """

    def __init__(self) -> None:
        self._changes = WholeExit()

    @classmethod
    @contextmanager
    def or_nothing(cls) -> Iterator[Undo]:
        """For the changes of an `apply`: if one of them fails, those before it are taken back. Ctrl-C waits, and takes all of them back.

        >>> values = [1]
        >>> with Undo.or_nothing() as undo:
        ...     values.append(2); undo.then(values.pop)
        ...     raise ValueError("of the next change")
        Traceback (most recent call last):
        ValueError: of the next change
        >>> values
        [1]
        """
        undo = cls()
        try:
            with interrupts_held_back():
                yield undo
        except BaseException:
            undo()
            raise

    def then(self, restore: Callable[..., Any], *values: Any) -> None:
        """Remember how to take a change back, right after it was made."""
        self._changes.callback(restore, *values)

    def __call__(self) -> None:
        """Restore."""
        self._changes.close()

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *exc: object) -> None:
        self()
