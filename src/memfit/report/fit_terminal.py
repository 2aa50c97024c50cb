"""Plans, fitted runs, checks and the table of levers on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from memfit.records import Plan
from memfit.report.fit_view import CheckView, FitView
from memfit.report.lines import SIZE, WIDTH, facts, paragraph, show, title
from memfit.report.plan_view import LeverRow, PlanView, plan_view

_LABEL = 9  # for the name of a figure
_LEVER, _CLASS = 16, 11  # for a lever's word and its exactness


def print_plan(plan: Plan, console: Console) -> None:
    """Show which techniques make a step fit, what each saves and costs, and what lost."""
    view, width = plan_view(plan), min(console.width, WIDTH)
    for section in (
        _plan_headline(view, width),
        _levers("What it does, in this order", view.levers, width),
        _levers("What lost", view.losers, width),
        _reachable(view, width),
    ):
        show(section, console, width)


def print_largest_batch(sizes: Mapping[str, int], budget: str, console: Console) -> None:
    """Show the largest batches that fit."""
    lines = [Text(f"The largest batch inside {budget}: these fit, a sixteenth more does not", "bold")]
    words = {
        "plain": "as the step is",
        "without_microbatch": "with the allowed techniques, in one piece",
        "with_microbatch": "with the allowed techniques, micro-batches among them",
    }
    lines += [Text.assemble((f"{sizes[key]:>{SIZE}}", "bold"), f"  {said}") for key, said in words.items()]
    if sizes["with_microbatch"] >= sizes["tried_up_to"]:
        lines.append(Text(f"{'':>{SIZE}}  ({sizes['tried_up_to']} fits, and none larger was tried)", "dim"))
    show(lines, console, min(console.width, WIDTH))


def print_fit(view: FitView, console: Console) -> None:
    """Show how a fitted step ran."""
    width = min(console.width, WIDTH)
    show(_fit_headline(view, width), console, width)
    show(facts(view.facts, width), console, width)


def print_check(view: CheckView, console: Console) -> None:
    """Show whether a step fits, why, and which modules grew."""
    width = min(console.width, WIDTH)
    show(_checked(view, width), console, width)
    if view.grown:
        rows = [Text.assemble((f"{more:>{SIZE}}", "bold"), f"  {module}") for more, module in view.grown]
        show([Text("What grew since the baseline, each at its highest", "bold"), *rows], console, width)


def print_levers(rows: Iterable[Sequence[str]], console: Console) -> None:
    """Show every technique: its word, its exactness, what it needs."""
    width = min(console.width, WIDTH)
    show(_table(rows, width), console, width)


def _plan_headline(view: PlanView, width: int) -> Iterator[Text]:
    yield from title("memfit plan", view.setting, width)
    yield Text(view.answer, "bold green")
    for amount, name, how in view.figures:
        first, *more = paragraph(how, width, SIZE + 2 + _LABEL)
        yield from (Text.assemble((f"{amount:>{SIZE}}  {name:<{_LABEL}}", "bold"), first.plain.strip()), *more)


def _levers(heading: str, rows: Sequence[LeverRow], width: int) -> Iterator[Text]:
    if rows:
        yield Text(heading, "bold")
    indent = SIZE + 2
    for row in rows:
        first, *more = paragraph(f"{row.name}: {row.option}", width, indent)
        yield from (Text(f"{row.saves:>{SIZE}}  {first.plain.strip()}", "bold"), *(Text(line.plain, "bold") for line in more))
        yield from paragraph(row.facts, width, indent)
        yield from paragraph(row.why, width, indent, "dim")


def _reachable(view: PlanView, width: int) -> Iterator[Text]:
    if view.reachable:
        yield Text(f"The lowest that can be reached{', as weighed' if view.reachable[0][0] else ''}", "bold")
    for amount, words in view.reachable:
        first, *more = paragraph(words, width, SIZE + 2)
        yield from (Text.assemble((f"{amount:>{SIZE}}  ", "bold"), first.plain.strip()), *more)


def _fit_headline(view: FitView, width: int) -> Iterator[Text]:
    yield from title("memfit fit", view.setting, width)
    yield Text(view.answer, "bold green" if view.inside else "bold red")
    yield Text(f"{'':<{SIZE}}{'plain, predicted':>20}{'fitted, predicted':>20}{'measured':>14}", "dim")
    for row in view.rows:
        yield Text.assemble((f"{row.name:<{SIZE}}", "bold"), f"{row.plain:>20}{row.predicted:>20}{row.measured:>14}")


def _checked(view: CheckView, width: int) -> Iterator[Text]:
    yield from title("memfit check", view.setting, width)
    yield Text(view.answer, "bold green" if view.good else "bold red")
    yield from paragraph(view.reason, width, 0)


def _table(rows: Iterable[Sequence[str]], width: int) -> Iterator[Text]:
    yield Text(f"{'lever':<{_LEVER}}{'exactness':<{_CLASS}}needs", "dim")
    for name, exactness, needs in rows:
        first, *more = paragraph(needs, width, _LEVER + _CLASS)
        yield from (Text.assemble((f"{name:<{_LEVER}}", "bold"), f"{exactness:<{_CLASS}}", first.plain.strip()), *more)
