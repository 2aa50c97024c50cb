"""What takes a lever off again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class Undo:
    """Called once, it restores everything an `apply` changed, last change first; called again, it does nothing.

    >>> values = [1]
    >>> undo = Undo()
    >>> values.append(2); undo.then(values.pop)
    >>> undo(); undo(); values
    [1]
    """

    def __init__(self) -> None:
        self._changes = ExitStack()

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
