"""What every command shares of the terminal: the screen, progress for someone who is looking, and JSON alone on standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text


class Screen(Console):
    """A console that leaves a closed pipe to `main`: rich would exit with 1, and that means "does not fit"."""

    def on_broken_pipe(self) -> None:
        """Called in place of rich's own exit."""
        raise BrokenPipeError


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner with words for someone who is looking; silence for anyone else."""
    if not console.is_terminal:
        yield lambda words: None
        return
    with console.status("", refresh_per_second=4) as status:
        yield lambda words: status.update(Text(words))  # plain words: brackets in them are no markup


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Whatever the user's code prints meanwhile goes to stderr, also from processes that it starts."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
