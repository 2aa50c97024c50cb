"""`memfit demo`: a step of memfit's own that needs several GiB, fitted into a fraction, proven and run."""

from __future__ import annotations

import contextlib
import json

import click
from rich.console import Console

import memfit
from memfit.commands.fit import print_trial
from memfit.commands.no import answer_for_json
from memfit.commands.screen import Screen, progress_on
from memfit.errors import Infeasible
from memfit.report.terminal import print_profile
from memfit.units import parse_bytes

_BUDGET = "1600MiB"
_STEPS = 2


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def demo_command(as_json: bool) -> None:
    """Fit a 3D autoencoder that needs several GiB into a fraction of it, prove it, and train a few steps."""
    from memfit.demo_step import volume_autoencoder
    from memfit.fitting.trial import try_out

    guarded = answer_for_json("memfit.demo/1", parse_bytes(_BUDGET)) if as_json else contextlib.nullcontext()
    with guarded, progress_on(Console(stderr=True)) as progress:
        fitted = memfit.fit(volume_autoencoder(), _BUDGET, progress=progress)
        trial = try_out(fitted, _STEPS, progress)
    if as_json:
        click.echo(json.dumps(trial.to_dict() | {"schema": "memfit.demo/1"}))
    else:
        screen = Screen()
        print_profile(fitted.baseline, screen)
        print_trial(trial, screen)
    if not trial.inside:
        raise click.exceptions.Exit(Infeasible.exit_code)
