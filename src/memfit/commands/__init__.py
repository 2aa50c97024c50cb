"""The command line: one file a subcommand, each reading its arguments and nothing more."""

from __future__ import annotations

import click

from memfit.commands.check import check_command
from memfit.commands.demo import demo_command
from memfit.commands.fit import fit_command
from memfit.commands.levers import levers_command
from memfit.commands.plan import plan_command
from memfit.commands.profile import profile_command
from memfit.commands.verify import verify_command

COMMANDS: tuple[click.Command, ...] = (
    profile_command,
    plan_command,
    verify_command,
    fit_command,
    check_command,
    levers_command,
    demo_command,
)
