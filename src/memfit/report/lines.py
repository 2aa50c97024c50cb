"""Lines on a terminal: what every screen is made of. 80 columns at most, readable without colours too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

WIDTH = 80
SIZE = 10  # columns for an amount of memory, the first on every line
FACT = 10  # for the name of a fact


def shortened(words: str, width: int) -> str:
    """Words that fit, cut at the left: the end of a path tells more than its beginning.

    >>> shortened("networks/nets/autoencoderkl.py:412", 24), shortened("short", 24)
    ('…/autoencoderkl.py:412', 'short')
    """
    if cell_len(words) <= width:
        return words
    while words and cell_len(words) >= width:
        words = words[1:]
    joint = min((at for at in (words.find("/"), words.find(".")) if at >= 0), default=0)
    return "…" + (words[joint:] if joint < len(words) // 2 else words)


def show(section: Iterable[Text], console: Console, width: int) -> None:
    """Print a section, and an empty line after it if there is anything in it."""
    lines = list(section)
    for line in [*lines, Text()] if lines else []:
        line.rstrip()
        console.print(line, width=width, no_wrap=True, overflow="ellipsis", highlight=False)


def paragraph(words: str, width: int, indent: int, style: str = "") -> Iterator[Text]:
    """Words in lines that fit."""
    for line in textwrap.wrap(words, max(width - indent, 10), break_on_hyphens=False):
        yield Text(" " * indent + line, style)


def title(command: str, setting: str, width: int) -> Iterator[Text]:
    """The first line of a screen: whose it is, and of what."""
    yield Text.assemble((command, "bold"), " " * max(width - len(command) - len(setting), 2), (setting, "dim"))
    yield Text("─" * width, "dim")


def notes_lines(notes: Iterable[str], width: int) -> Iterator[Text]:
    """What a reader has to know to judge the rest."""
    for note in notes:
        for line in textwrap.wrap(f"Note  {note}", width, subsequent_indent=" " * 6, break_on_hyphens=False):
            yield Text(line, "yellow")


def facts(rows: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """A name and words each."""
    for name, words in rows:
        first, *more = paragraph(words, width, FACT) if words else (Text(),)
        yield from (Text.assemble((f"{name:<{FACT}}", "bold"), first.plain.strip()), *more)
