"""What memfit's commands say of a recipe's step, shortened for its README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memfit.records import EXACTNESS


def told(file: Path, command: str, *flags: str) -> str:
    """The screen of a command on the file's `make_step`."""
    line = [sys.executable, "-m", "memfit", command, f"{file}:make_step", *flags]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def findings(profile: str, *levers: str) -> str:
    """Those of its findings that lead to one of these levers."""
    found = re.split(r"\n(?= *[0-9.]+ [KMGT]?i?B  )", profile.partition("What stands out")[2].partition("\n\n")[0])
    kept = [text.strip("\n") for text in found if any(f"lever: {lever}" in text for lever in levers)]
    return "\n".join(["```", *kept, "```"])


def techniques(plan: str) -> str:
    """What it comes to, and each technique's name, exactness and cost, without the reasons."""
    summary, _, rest = plan.strip("\n").partition("What it does, in this order\n")
    does = rest.partition("\n\n")[0].splitlines()
    kept = [line for line in does if re.match(r" *[0-9.]+ [KMGT]?i?B  ", line) or line.strip().startswith(EXACTNESS)]
    return "\n".join(["```", *(line for line in summary.splitlines() if line.strip("─ ")), *kept, "```"])
