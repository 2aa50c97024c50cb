"""`memfit fit`: a step made to fit a budget, proven, and really run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click
from rich.console import Console

import memfit
from memfit.commands.no import answer_for_json
from memfit.commands.screen import Screen, progress_on
from memfit.commands.target import load_step, step_errors
from memfit.errors import Infeasible, MemfitError
from memfit.records import EXACTNESS, Plan
from memfit.report.fit_terminal import print_fit, print_plan
from memfit.report.fit_view import fit_view
from memfit.report.terminal import print_verdict
from memfit.units import parse_bytes

if TYPE_CHECKING:
    from memfit.fitting.trial import Trial
    from memfit.levers import Lever


@click.command("fit")
@click.argument("target")
@click.option("--budget", required=True, metavar="BYTES", help="What the process may take, as in 6GiB.")
@click.option("--plan", "plan_file", metavar="FILE", help="Apply this plan, as memfit plan wrote it, and look for no other.")
@click.option("--host-budget", metavar="BYTES", help="What it may take of the host's memory, where the device has memory of its own.")
@click.option("--allow", default="reordered", show_default=True, metavar="CLASS", help=f"The loosest exactness: {', '.join(EXACTNESS)}.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1), help="How many fitted steps are really run.")
@click.option(
    "--compile-for",
    metavar="STEPS",
    type=click.IntRange(min=1),
    help="Also try torch.compile, its seconds spread over so many steps; the plain step is run for it, whatever the budget.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def fit_command(
    target: str,
    budget: str,
    plan_file: str | None,
    host_budget: str | None,
    allow: str,
    steps: int,
    compile_for: int | None,
    as_json: bool,
) -> None:
    """Profile, plan, verify and apply, then run fitted steps: exit 0 if they stay inside the budget, 1 if it cannot be done.

    TARGET is path/to/file.py:function or package.module:function; the function returns a memfit.Step.
    """
    from memfit.fitting.trial import try_out

    budget_bytes, plan = parse_bytes(budget), None if plan_file is None else Plan.load(plan_file)
    if plan is not None and compile_for is not None:
        raise MemfitError("--compile-for is for looking for a plan, and --plan gives one: leave one of them out.")
    guarded = answer_for_json("memfit.fit/1", budget_bytes) if as_json else contextlib.nullcontext()
    with guarded, progress_on(Console(stderr=True)) as progress:
        progress("building the step")
        step = load_step(target, simulate=False)
        with step_errors():
            levers = _levers(step, compile_for, progress)
            fitted = memfit.fit(step, budget_bytes, plan=plan, allow=allow, host_budget=host_budget, levers=levers, progress=progress)
            trial = try_out(fitted, steps, progress)
    if as_json:
        click.echo(json.dumps(trial.to_dict()))
    else:
        print_trial(trial, Screen())
    if not trial.inside:
        raise click.exceptions.Exit(Infeasible.exit_code)


def _levers(step: memfit.Step, compile_for: int | None, progress: Callable[[str], None]) -> Mapping[str, Lever]:
    from memfit.fitting.compiling import measured_compile
    from memfit.levers import LEVERS

    if compile_for is None:
        return LEVERS
    return LEVERS | {"compile": measured_compile(step, run_steps=compile_for, progress=progress)}


def print_trial(trial: Trial, screen: Console) -> None:
    """The plan, its proof, and how it ran."""
    from memfit.fitting.trial import slowdown_of

    fitted, plan = trial.fitted, trial.fitted.plan
    print_plan(plan, screen)
    print_verdict(fitted.verdict, screen)
    slowdown = slowdown_of(fitted)
    view = fit_view(fitted.baseline, fitted.ledger, trial.measured, plan.budget_bytes, slowdown, trial.losses_in_words)
    print_fit(view, screen)
