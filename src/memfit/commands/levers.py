"""`memfit levers`: every technique memfit knows."""

from __future__ import annotations

import json

import click

from memfit.commands.screen import Screen
from memfit.report.fit_terminal import print_levers


@click.command("levers")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def levers_command(as_json: bool) -> None:
    """List every technique: its word, the class of its strictest option, and what it needs."""
    from memfit.levers import LEVERS

    if as_json:
        rows = [{"name": lever.name, "exactness": lever.exactness, "needs": lever.needs} for lever in LEVERS.values()]
        click.echo(json.dumps({"schema": "memfit.levers/1", "levers": rows}))
    else:
        print_levers([(lever.name, lever.exactness, lever.needs) for lever in LEVERS.values()], Screen())
