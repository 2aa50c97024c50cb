"""What frontier.py found, as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

_HEADER = ("way", "peak", "of eager", "CPU time", "gradients", "inside its limit", "set-up")
_COLOURS = {"memfit": "#0b7a75", "eager": "#222222", "checkpoint": "#d1495b", "save_on_cpu": "#8d99ae"}
_COLOURS |= {"micro-batching": "#edae49", "aot_eager": "#6a4c93", "inductor": "#1982c4", "memfit, compile allowed": "#70c1b3"}
_LONGEST_NAME = 70
_PANELS = 3  # of the picture, side by side


def cells(way: dict[str, Any], eager: dict[str, Any]) -> list[str]:
    """A way as words."""
    name = f"{way['family']}: {way['name']}" if way["family"].startswith("memfit") else way["name"]
    inside = "" if way["limit"] is None else "yes" if way["peak"] <= way["limit"] else "NO"
    set_up = f"{way['set_up_seconds']:.0f} s" if way["family"].startswith(("memfit", "aot_eager", "inductor")) else ""
    share, slower = f"{way['peak'] / eager['peak']:.3f}", f"{way['seconds'] / eager['seconds']:.2f}"
    return [name[:_LONGEST_NAME], f"{way['peak'] / 2**20:.0f} MiB", share, slower, way["gradients"], inside, set_up]


def table_of(ways: list[dict[str, Any]]) -> Table:
    """For the terminal."""
    table = Table(*_HEADER)
    for way in ways:
        table.add_row(*cells(way, ways[0]))
    return table


def noise_of(ways: list[dict[str, Any]]) -> float:
    """How much longer the slower of the two eagers took than the other."""
    eager = [way["seconds"] for way in ways if way["family"] == "eager"]
    return max(eager) / min(eager) - 1


def dominated(ways: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """memfit's points that an eager or aot_eager peer with right gradients beats in both peak and, beyond the noise, time; and the peer."""
    rivals = [w for w in ways if not w["family"].startswith(("memfit", "inductor")) and "WRONG" not in w["gradients"]]
    at_least = 1 + noise_of(ways)
    return [
        (mine["name"], rival["name"])
        for mine in ways
        for rival in rivals
        if mine["family"] == "memfit" and rival["peak"] <= mine["peak"] and rival["seconds"] * at_least < mine["seconds"]
    ]


def write_report(results: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """frontier.md with every row, frontier.svg with every model."""
    lines = [
        "# Peak against time",
        "",
        "Written by `make bench-frontier`; peaks above what was there before, CPU time as a ratio to eager's.",
        "",
    ]
    for model, ways in results.items():
        lines += [f"## {model}", "", "| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
        lines += ["| " + " | ".join(cells(way, ways[0])) + " |" for way in ways]
        beaten = [f"{mine} by {rival}" for mine, rival in dominated(ways)]
        words = "; ".join(beaten) if beaten else "none of memfit's points"
        lines += ["", f"Noise of the run: {noise_of(ways):.1%}. Beaten in both by an eager or aot_eager peer: {words}.", ""]
    (folder / "frontier.md").write_text("\n".join(lines))
    draw(results, folder / "frontier.svg")


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A panel a model: peak against time, both as shares of eager's; wrong gradients are crossed out."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = -(-len(results) // _PANELS)
    figure, axes = pyplot.subplots(rows, _PANELS, figsize=(4.2 * _PANELS, 3.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, (model, ways) in zip(axes.flat, results.items(), strict=False):
        _draw_panel(axis, ways)
        axis.set(title=model, xlabel="peak, of eager's", xlim=(0, 1.1))
        axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("CPU time, of eager's")
    families = axes[0][0].get_legend_handles_labels()
    figure.legend(
        *families, loc="outside upper center", ncols=len(_COLOURS), fontsize=8, title="a cross: wrong gradients", title_fontsize=8
    )
    figure.savefig(path)
    pyplot.close(figure)


def _draw_panel(axis: Any, ways: list[dict[str, Any]]) -> None:
    """One model: a colour a family, memfit's points joined."""
    for family, colour in _COLOURS.items():
        mine = [way for way in ways if way["family"] == family]
        points = sorted((w["peak"] / ways[0]["peak"], w["seconds"] / ways[0]["seconds"], "WRONG" in w["gradients"]) for w in mine)
        right, wrong = ([p[:2] for p in points if p[2] is crossed] for crossed in (False, True))
        axis.plot(*_columns(right), "-o" if family == "memfit" else "o", color=colour, label=family, markersize=5)
        axis.plot(*_columns(wrong), "x", color=colour, markersize=7)


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
