"""Records on a terminal: 80 columns at most, readable without colours too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from memfit.records import Finding, Ledger, Verdict
from memfit.report.lines import SIZE, WIDTH, facts, notes_lines, paragraph, shortened, show, title
from memfit.report.profile_view import Bar, Chart, OwnerRow, ProfileView, chart_of, percent, profile_view
from memfit.report.verdict_view import LossRow, VerdictView, verdict_view
from memfit.units import format_bytes

_LABEL = 9  # for the name of a headline figure
_CATEGORY = 11
_WHAT = 27  # for an op and how many of its results are held
_LOSS = 24  # for the name of a loss
_ROWS = 8  # of the chart
_UP, _RIGHT = " ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█"
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
_COLOURS = {
    "parameters": "blue",
    "gradients": "yellow",
    "optimizer": "green",
    "activations": "magenta",
    "temporaries": "cyan",
}
_TONES = ("blue", "bright_blue")  # of phases, in turn


def print_profile(ledger: Ledger, console: Console) -> None:
    """Show where every byte of a step goes."""
    view, width = profile_view(ledger), min(console.width, WIDTH)
    chart = chart_of(ledger, max(width - SIZE, 1))
    for section in (
        _headline(view, width),
        _bars(view, width),
        _owners(view, width),
        _findings(view, width),
        _timeline(chart) if chart else (),
        notes_lines(view.notes, width),
    ):
        show(section, console, width)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Show whether a fitted step is still the same training."""
    view, width = verdict_view(verdict), min(console.width, WIDTH)
    for section in (_answer(view, width), facts(view.facts, width), _losses(view.losses), notes_lines(view.notes, width)):
        show(section, console, width)


def _headline(view: ProfileView, width: int) -> Iterator[Text]:
    yield from title("memfit profile", view.setting, width)
    for figure in (view.peak, view.process):
        name = f"{format_bytes(figure.bytes):>{SIZE}}  {figure.name:<{_LABEL}}"
        first, *more = paragraph(figure.how, width, len(name))
        yield from (Text.assemble((name, "bold"), first.plain.strip()), *more)
    yield from paragraph(view.process_parts, width, SIZE + 2, "dim")


def _bars(view: ProfileView, width: int) -> Iterator[Text]:
    yield Text(f"What fills the peak{', reached in ' + view.peak_phase if view.peak_phase else ''}", "bold")
    room = max(width - SIZE - _CATEGORY - 12, 1)
    for bar in view.bars:
        yield _bar(bar, room)
    if not view.bars:
        yield Text(f"{'0 B':>{SIZE}}  the step took no memory")


def _bar(bar: Bar, room: int) -> Text:
    eighths = max(1, round(8 * room * min(bar.share, 1)))
    drawn = "█" * (eighths // 8) + _RIGHT[eighths % 8].strip()
    share = f"  {bar.category:<{_CATEGORY}}{percent(bar.share):>8}  "
    return Text.assemble((f"{format_bytes(bar.bytes):>{SIZE}}", "bold"), share, (drawn, _COLOURS.get(bar.category, "")))


def _owners(view: ProfileView, width: int) -> Iterator[Text]:
    if view.owners:
        yield Text("Who holds it", "bold")
    for row in view.owners:
        yield from _owner(row, width)
    if view.other_owners:
        yield Text(f"{'…':>{SIZE}}  {view.other_owners}", "dim")


def _owner(row: OwnerRow, width: int) -> Iterator[Text]:
    """Two lines in three columns: how much, what, where."""
    room = width - SIZE - 4
    left = min(_WHAT, room // 2)
    op, _, remark = row.op.partition(" ")
    category = f"{row.category} {remark}".rstrip()
    whats = [what for what in (op, category) if what]
    whats[0] = _counted(whats[0], row.count, left)
    wheres = [shortened(where, room - left) for where in (row.module, row.source) if where]
    for size, what, where in zip_longest([format_bytes(row.bytes)], whats, wheres, fillvalue=""):
        style = _COLOURS.get(row.category, "") if what.startswith(row.category) else ""
        yield Text.assemble((f"{size:>{SIZE}}  ", "bold"), (set_cell_size(what, left) + "  ", style), (where, "" if size else "dim"))


def _counted(what: str, count: int, room: int) -> str:
    times = f" x{count}" if count > 1 else ""
    room -= len(times)
    return (what if cell_len(what) <= room else set_cell_size(what, room - 1) + "…") + times


def _findings(view: ProfileView, width: int) -> Iterator[Text]:
    if view.findings:
        yield Text("What stands out", "bold")
    for finding in view.findings:
        yield from _finding(finding, width)
    if view.other_findings:
        yield Text(f"{'…':>{SIZE}}  {view.other_findings}", "dim")


def _finding(finding: Finding, width: int) -> Iterator[Text]:
    indent = SIZE + 2
    yield Text(f"{format_bytes(finding.bytes):>{SIZE}}  {shortened(finding.where, width - indent)}", "bold")
    yield from paragraph(finding.why, width, indent)
    if finding.lever:
        yield Text.assemble(" " * indent, ("→ lever: ", "dim"), (finding.lever, "green"))


def _timeline(chart: Chart) -> Iterator[Text]:
    yield Text.assemble(("Memory over the step", "bold"), (", op by op (phases not to scale, ▲ the peak)", "dim"))
    tones = [_TONES[number % 2] for number, span in enumerate(chart.spans) for _ in range(span.first, span.last + 1)]
    for row in range(_ROWS - 1, -1, -1):
        yield Text.assemble(_scale(chart, row), *((_cell(chart, row, at), tone) for at, tone in enumerate(tones)))
    starts = {span.first for span in chart.spans[1:]}
    ticks = ("▲" if at == chart.peak_column else "┬" if at in starts else "─" for at in range(len(chart.columns)))
    yield Text(f"{'0 B':>{SIZE - 2}} ┼" + "".join(ticks))
    yield _labels((_phase_word(span.phase, span.last - span.first), span.last - span.first + 1) for span in chart.spans)
    if any(span.loss for span in chart.spans):
        losses = [(loss, list(spans)) for loss, spans in groupby(chart.spans, lambda span: span.loss)]
        yield _labels((loss, spans[-1].last - spans[0].first + 1) for loss, spans in losses)


def _scale(chart: Chart, row: int) -> str:
    marked = {_ROWS - 1: chart.top, _ROWS // 2 - 1: chart.top // 2}
    size = format_bytes(marked[row]) if row in marked else ""
    return f"{size:>{SIZE - 2}} {'┤' if size else '│'}"


def _cell(chart: Chart, row: int, column: int) -> str:
    size = chart.columns[column]
    eighths = max(round(8 * _ROWS * size / chart.top), 1 if size else 0)
    return _UP[min(max(eighths - 8 * row, 0), 8)]


def _phase_word(phase: str, room: int) -> str:
    return phase if len(phase) <= room else _SHORT.get(phase, "")


def _labels(words: Iterable[tuple[str, int]]) -> Text:
    return Text(" " * SIZE + "".join(set_cell_size(word, room - 1) + " " for word, room in words))


def _answer(view: VerdictView, width: int) -> Iterator[Text]:
    yield from title("memfit verify", view.setting, width)
    yield Text(view.answer, "bold green" if view.equivalent else "bold red")
    yield from paragraph(view.meaning, width, 0)


def _losses(rows: tuple[LossRow, ...]) -> Iterator[Text]:
    if rows:
        yield Text.assemble((f"{'Losses':<{_LOSS}}", "bold"), (f"{'plain':>16}{'fitted':>16}{'difference':>14}", "dim"))
    for row in rows:
        yield Text(f"{shortened(row.name, _LOSS - 2):<{_LOSS}}{row.plain:>16}{row.fitted:>16}{row.difference:>14}")
