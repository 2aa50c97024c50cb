"""How close memfit's predictions come to the truth, over the zoo: `python benchmarks/accuracy.py [--rows PATTERN] [--quick] [--json OUT]`.

Every measurement and every prediction is a process of its own, two at a time: memory is compared, not time. Exits with 1 if a figure
misses its bound. A run over all rows writes its tables to results/accuracy.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from memfit.units import format_bytes
from zoo import ROWS

_HERE = Path(__file__).parent
_YES = {True: "yes", False: "NO"}
_MALLOC: dict[str, dict[str, str]] = {"unpinned": {}, "pinned": {"MALLOC_MMAP_THRESHOLD_": str(2**20)}}
_PEAK_COLUMNS = ("row", "peak", "predicted", "error", "inside", "width")
_PROCESS_COLUMNS = ("process, pinned", "predicted", "error", "process, unpinned", "interval", "inside")
_PROCESS_ROWS = {row.split("-")[0]: row for row in reversed(ROWS)}.values()  # each model's first: twenty steps, twice, take long
Row = dict[str, "_Outcome"]  # "peak", and unless only that was asked for "pinned" and "unpinned"
Figure = tuple[str, float, str, bool]  # what, its value in per cent, the bound in words, whether it is kept


@dataclass(frozen=True)
class _Outcome:
    """A measured number of bytes and what was predicted for it; error and width are in per cent of the truth."""

    measured: int
    predicted: int
    low: int
    high: int

    @property
    def error(self) -> float:
        return 100 * (self.predicted - self.measured) / self.measured

    @property
    def width(self) -> float:
        return 100 * (self.high - self.low) / self.measured

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def _run(malloc: str, cache: str, script: str, *arguments: str) -> dict[str, Any]:
    """What a script of ours prints, run with these malloc settings and no others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    chosen = {"MEMFIT_CACHE": cache, "OMP_WAIT_POLICY": "PASSIVE"}  # two processes share the cores: threads that wait must not spin
    ran = subprocess.run([sys.executable, _HERE / script, *arguments], env=kept | chosen | _MALLOC[malloc], capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"{script} died with {ran.returncode}"])[-1])
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def _measure(row: str, quick: bool, cache: str) -> Row:
    told = {malloc: _run(malloc, cache, "prediction.py", row) for malloc in _MALLOC if malloc == "unpinned" or not quick}
    seen = _run("unpinned", cache, "truth.py", "peak", row)["peak_bytes"]
    found = {"peak": _Outcome(seen, *(told["unpinned"][f"{key}_bytes"] for key in ("peak", "low", "high")))}
    for malloc in () if quick else _MALLOC:
        seen = _run(malloc, cache, "truth.py", "process", row)["process_bytes"]
        found[malloc] = _Outcome(seen, *(told[malloc][f"process{key}_bytes"] for key in ("", "_low", "_high")))
    return found


def _measure_all(rows: Sequence[str], quick: bool, console: Console) -> dict[str, Row | BaseException]:
    """What was found for each row, or why it failed; the cache is fresh, so that no older measurement is judged."""
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(2) as pool:
        running = {pool.submit(_measure, row, quick or row not in _PROCESS_ROWS, cache): row for row in rows}
        done = {running[job]: job for job in track(as_completed(running), "measuring and predicting", len(rows), console=console)}
    return {row: done[row].exception() or done[row].result() for row in rows}


def _cells(name: str, row: Row) -> list[str]:
    peak = row["peak"]
    cells = [name, *map(format_bytes, (peak.measured, peak.predicted)), f"{peak.error:+.2f} %", _YES[peak.inside], f"{peak.width:.1f} %"]
    if "pinned" in row:
        pinned, unpinned = row["pinned"], row["unpinned"]
        cells += [*map(format_bytes, (pinned.measured, pinned.predicted)), f"{pinned.error:+.1f} %", format_bytes(unpinned.measured)]
        cells += [f"{format_bytes(unpinned.low)} – {format_bytes(unpinned.high)}", _YES[unpinned.inside]]
    return cells


def _figures(rows: Sequence[Row]) -> list[Figure]:
    def figure(name: str, value: float, bound: float, least: bool = False) -> Figure:
        return name, value, f"{'≥' if least else '≤'} {bound:g} %", value >= bound if least else value <= bound

    def figures(name: str, part: str, mid: float, worst: float) -> list[Figure]:
        off = [abs(row[part].error) for row in rows if part in row]
        return [figure(f"{name}: median error", median(off), mid), figure(f"{name}: worst error", max(off), worst)]

    def held(name: str, part: str) -> Figure:
        inside = [row[part].inside for row in rows if part in row]
        return figure(f"{name}: inside the interval", 100 * sum(inside) / len(inside), 95, least=True)

    found = [*figures("peak", "peak", 1, 3), figure("peak: lowest error", min(row["peak"].error for row in rows), -1, least=True)]
    found += [held("peak", "peak"), figure("peak: widest interval", max(row["peak"].width for row in rows), 5)]
    if any("pinned" in row for row in rows):
        found += [*figures("process, pinned", "pinned", 5, 10), held("process, unpinned", "unpinned")]
    return found


def _show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> str:
    """Print a table; the same as markdown."""
    table = Table(*head, title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)) + "\n\n"


def main() -> int:
    """Measure, tell, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="*", help="a pattern of row names, as in 'gpt2*'")
    parser.add_argument("--quick", action="store_true", help="only torch's peak, not what the process takes")
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    asked, console = parser.parse_args(), Console(width=None if sys.stdout.isatty() else 200)
    results = _measure_all(fnmatch.filter(ROWS, asked.rows), asked.quick, console)
    found = {name: row for name, row in results.items() if not isinstance(row, BaseException)}
    figures = _figures(list(found.values())) if found else []
    told = [(name, f"{value:+.2f} %", bound, _YES[kept]) for name, value, bound, kept in figures]
    head = _PEAK_COLUMNS if asked.quick else _PEAK_COLUMNS + _PROCESS_COLUMNS
    written = _show("accuracy", head, [_cells(name, row) for name, row in found.items()], console)
    written += _show("figures", ("figure", "value", "bound", "kept"), told, console)
    if failed := [(name, str(error)) for name, error in results.items() if isinstance(error, BaseException)]:
        written += _show("failed", ("row", "why"), failed, console)
    if asked.rows == "*":
        (_HERE / "results" / "accuracy.md").write_text(written)
    if asked.json:
        asked.json.write_text(json.dumps({name: {part: asdict(o) for part, o in row.items()} for name, row in found.items()}, indent=1))
    return 0 if found and not failed and all(kept for *_, kept in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
