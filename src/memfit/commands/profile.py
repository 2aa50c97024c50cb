"""`memfit profile`: where every byte of a training step goes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.text import Text

import memfit
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


class Screen(Console):
    """A console that leaves a closed pipe to `main`: rich would exit with 1, and that means "does not fit"."""

    def on_broken_pipe(self) -> None:
        """Called in place of rich's own exit."""
        raise BrokenPipeError


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner with words for someone who is looking; silence for anyone else."""
    if not console.is_terminal:
        yield lambda words: None
        return
    with console.status("", refresh_per_second=4) as status:
        yield lambda words: status.update(Text(words))  # plain words: brackets in them are no markup


@contextlib.contextmanager
def stdout_for_json() -> Iterator[None]:
    """Whatever the user's code prints meanwhile goes to stderr, also from processes that it starts."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
