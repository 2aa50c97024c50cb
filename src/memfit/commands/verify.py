"""`memfit verify`: whether a fitted step is still the same training."""

from __future__ import annotations

import contextlib
import json

import click
from rich.console import Console

import memfit
from memfit.commands.no import no_verdict
from memfit.commands.screen import Screen, progress_on, stdout_for_json
from memfit.commands.target import load_step, step_errors
from memfit.errors import Infeasible, NotEquivalent
from memfit.records import Plan
from memfit.report.terminal import print_verdict
from memfit.units import parse_bytes


@click.command("verify")
@click.argument("target")
@click.option("--plan", "plan_file", required=True, metavar="FILE", help="The plan, as memfit plan wrote it.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="How many steps are compared.")
@click.option(
    "--limit",
    metavar="BYTES",
    help="What the process may take, as in 6GiB: a plain step that needs more runs on fewer samples. Default: what this machine has.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def verify_command(target: str, plan_file: str, steps: int, limit: str | None, as_json: bool) -> None:
    """Prove that a plan leaves the training the same: exit 0 if it does, 1 if it does not or not all could be compared.

    TARGET is path/to/file.py:function or package.module:function; the function returns a memfit.Step.
    """
    plan = Plan.load(plan_file)
    limit_bytes = None if limit is None else parse_bytes(limit)
    try:
        with stdout_for_json() if as_json else contextlib.nullcontext(), progress_on(Console(stderr=True)) as progress:
            progress("building the step")
            step = load_step(target, simulate=False)
            with step_errors():
                verdict = memfit.verify(step, plan, steps=steps, limit_bytes=limit_bytes, progress=progress)
    except Infeasible as no:
        if not as_json:
            raise
        click.echo(json.dumps(no_verdict(no, plan)))
        raise click.exceptions.Exit(no.exit_code) from no
    if as_json:
        click.echo(json.dumps(verdict.to_dict()))
    else:
        print_verdict(verdict, Screen())
    if not verdict.equivalent:
        raise click.exceptions.Exit(NotEquivalent.exit_code)
