"""`memfit check`: whether a step fits a budget, as a gate for continuous integration."""

from __future__ import annotations

import contextlib
import json

import click
from rich.console import Console

import memfit
from memfit.commands.screen import Screen, progress_on, stdout_for_json
from memfit.commands.target import load_step, step_errors
from memfit.errors import Infeasible
from memfit.fitting.checking import grown_since, parse_tolerance, refuse_incomparable, why_it_fits
from memfit.growth import growth_facts
from memfit.records import Ledger
from memfit.report.fit_terminal import print_check
from memfit.report.fit_view import check_view
from memfit.units import format_bytes, parse_bytes

_MAY_GROW = (
    "By how much a module may grow. What is below a twentieth of that share of the whole peak is no growth, unless the peak itself grew by "
    "more than the share."
)


@click.command("check")
@click.argument("target")
@click.option("--budget", required=True, metavar="BYTES", help="What the process may take, as in 6GiB.")
@click.option("--baseline", metavar="FILE", help="What memfit profile --simulate --json wrote: modules that grew since are a no.")
@click.option("--tolerance", default="2%", show_default=True, metavar="PERCENT", help=_MAY_GROW)
@click.option("--device", metavar="NAME", help="The device to check for, as in cuda; it need not be here.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def check_command(target: str, budget: str, baseline: str | None, tolerance: str, device: str | None, as_json: bool) -> None:
    """Say whether a step fits a budget, without running it: exit 0 if it does, 1 if it does not or has grown.

    A step that leaves memory behind each time does not, unless there is room for a million of them.

    TARGET is path/to/file.py:function or package.module:function; the function returns a memfit.Step.
    """
    budget_bytes, allowed = parse_bytes(budget), parse_tolerance(tolerance)
    before = None if baseline is None else Ledger.load(baseline)
    with stdout_for_json() if as_json else contextlib.nullcontext(), progress_on(Console(stderr=True)) as progress:
        progress("building the step")
        step = load_step(target, simulate=True)
        with step_errors():
            ledger = memfit.profile(step, simulate=True, device=device, progress=progress)
    fits, reason = why_it_fits(ledger, budget_bytes)
    if before is not None:
        refuse_incomparable(before, ledger, f"{target} --simulate" + (f" --device {device}" if device else ""))
    grown = [] if before is None else grown_since(before, ledger, allowed)
    if grown:
        more = format_bytes(sum(int(row["bytes"]) for row in grown))
        reason += f" {len(grown)} module{'s' * (len(grown) > 1)} grew by more than {tolerance} since {baseline}, by {more} in all."
    if as_json:
        answer = {"schema": "memfit.check/1", "fits": fits, "budget_bytes": budget_bytes, "process_bytes": ledger.process_bytes}
        answer |= {"process_high_bytes": ledger.process_high_bytes, "reason": reason, "grown": grown}
        answer |= growth_facts(ledger, budget_bytes)
        click.echo(json.dumps(answer))
    else:
        print_check(check_view(fits, budget_bytes, ledger.device, reason, grown), Screen())
    if not fits or grown:
        raise click.exceptions.Exit(Infeasible.exit_code)
