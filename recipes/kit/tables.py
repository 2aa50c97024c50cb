"""Tables in a recipe's README, written again by `make recipes`: between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def write_table(readme: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Replace the named table; a README without its marks is refused, so that no result is lost."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    write_block(readme, name, "\n".join(lines))


def write_block(readme: Path, name: str, text: str) -> None:
    """Replace what stands between the named marks."""
    marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(\n?<!-- end -->)", re.DOTALL)
    before = readme.read_text()
    after, found = marks.subn(lambda match: f"{match[1]}{text}\n<!-- end -->", before)
    if found != 1:
        raise SystemExit(f"{readme} has {found} places marked <!-- table: {name} -->, and needs one.")
    readme.write_text(after)
