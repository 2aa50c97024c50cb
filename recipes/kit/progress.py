"""A progress bar with the loss and the memory of the whole process tree in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memfit.units import format_bytes


def tree_bytes() -> int:
    """What this process and its children (loader workers) hold resident; pages they share are counted once."""
    return int(psutil.Process().memory_info().rss) + children_bytes()


def children_bytes() -> int:
    """What the children (loader workers) add to it."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += int(child.memory_full_info().uss)
    return total


@contextlib.contextmanager
def bar(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """`advance("loss 0.12")` moves on by one batch."""
    words = TextColumn("{task.fields[words]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total, words="")

        def advance(words: str) -> None:
            progress.update(task, advance=1, words=f"{words} | {format_bytes(tree_bytes())}")

        yield advance
