"""`memfit profile`: where every byte of a training step goes."""

from __future__ import annotations

import contextlib
import json

import click
from rich.console import Console

import memfit
from memfit.commands.screen import Screen, progress_on, stdout_for_json
from memfit.commands.target import load_step, step_errors
from memfit.report.terminal import print_profile


@click.command("profile")
@click.argument("target")
@click.option("--simulate", is_flag=True, help="Predict instead of measure: no memory is touched.")
@click.option("--device", metavar="NAME", help="The device to profile for, as in cuda; one that is not here needs --simulate.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def profile_command(target: str, simulate: bool, device: str | None, as_json: bool) -> None:
    """Show where every byte of a training step goes.

    TARGET is path/to/file.py:function or package.module:function; the function returns a memfit.Step.
    """
    with stdout_for_json() if as_json else contextlib.nullcontext(), progress_on(Console(stderr=True)) as progress:
        progress("building the step")
        step = load_step(target, simulate)
        with step_errors():
            ledger = memfit.profile(step, simulate=simulate, device=device, progress=progress)
    if as_json:
        click.echo(json.dumps(ledger.to_dict()))
    else:
        print_profile(ledger, Screen())
