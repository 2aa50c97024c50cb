"""The `memfit` command: finds the subcommand, and is the one place that turns errors into exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence

import click

from memfit.commands import COMMANDS
from memfit.errors import MemfitError

_OWN_FAULT = 3
_INTERRUPTED = 130
_PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended: 1 would mean "does not fit"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@click.group(name="memfit", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version("memfit"), prog_name="memfit")
def memfit() -> None:
    """Make a PyTorch training step fit a memory budget, and see where every byte goes.

    TARGET is path/to/file.py:function or package.module:function; the function takes no arguments and returns a memfit.Step.
    """


for command in COMMANDS:
    memfit.add_command(command)


def main() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that lacks a character shows "?" instead
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; the answer is the exit code."""
    try:
        with memfit.make_context("memfit", list(arguments)) as context:
            memfit.invoke(context)
        sys.stdout.flush()  # here, where a closed pipe is understood
        return 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as mistake:
        mistake.show()
        return MemfitError.exit_code
    except MemfitError as mistake:
        click.echo(mistake, err=True)
        return mistake.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it exits
        return _PIPE_CLOSED
    except Exception as fault:
        _tell_own_fault(fault)
        return _OWN_FAULT


def _tell_own_fault(fault: Exception) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="memfit-fault-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"memfit {_version('memfit')}, torch {_version('torch')}, Python {platform.python_version()}, {platform.platform()}\n")
        file.write(f"arguments: {sys.argv[1:]}\n\n")
        file.writelines(traceback.format_exception(fault))
    last_line = traceback.format_exception_only(fault)[-1].strip()
    click.echo(
        f"memfit failed: {last_line}\n"
        "This is a fault in memfit, not in your code. To report it, open an issue and attach this file,\n"
        f"which holds the whole traceback: {file.name}",
        err=True,
    )
