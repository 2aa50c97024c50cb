"""`memfit demo`: a step of memfit's own, measured and predicted, and how far the two are apart."""

from __future__ import annotations

import contextlib
import json

import click
from rich.console import Console

import memfit
from memfit.commands.screen import Screen, progress_on, stdout_for_json
from memfit.report.terminal import print_comparison, print_profile


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print both records as JSON.")
def demo_command(as_json: bool) -> None:
    """Profile a small 3D autoencoder, measured and predicted."""
    from memfit.capture.simulation import built_without_memory
    from memfit.demo_step import volume_autoencoder

    with stdout_for_json() if as_json else contextlib.nullcontext(), progress_on(Console(stderr=True)) as progress:
        # the prediction comes first, in a process that has not trained yet, as it would for a user
        predicted = memfit.profile(built_without_memory(volume_autoencoder), simulate=True, progress=progress)
        measured = memfit.profile(volume_autoencoder(), progress=progress)
    if as_json:
        click.echo(json.dumps({"schema": "memfit.demo/1", "measured": measured.to_dict(), "predicted": predicted.to_dict()}))
        return
    console = Screen()
    print_profile(predicted, console)
    print_profile(measured, console)
    print_comparison(measured, predicted, console)
