"""The command line: one file a subcommand, each reading its arguments and nothing more."""

from __future__ import annotations

import click

from memfit.commands.demo import demo_command
from memfit.commands.profile import profile_command
from memfit.commands.verify import verify_command

COMMANDS: tuple[click.Command, ...] = (profile_command, verify_command, demo_command)
