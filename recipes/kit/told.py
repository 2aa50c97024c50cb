"""What memfit's commands say of a recipe's step, shortened for its README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memfit.records import EXACTNESS

_BYTES = r" *[0-9.]+ [KMGT]?i?B  "


def told(file: Path, command: str, *flags: str, function: str = "make_step") -> str:
    """The screen of a command on a function of the file."""
    line = [sys.executable, "-m", "memfit", command, f"{file}:{function}", *flags]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def findings(profile: str, *levers: str, peak: bool = False) -> str:
    """Those of its findings that lead to one of these levers; before them the peak, if it is asked for."""
    kept = [line for line in profile.splitlines() if peak and re.match(f"{_BYTES}Peak ", line)]
    found = re.split(f"\n(?={_BYTES})", profile.partition("What stands out")[2].partition("\n\n")[0])
    kept += [text.strip("\n") for text in found if any(f"lever: {lever}" in text for lever in levers)]
    return "\n".join(["```", *kept, "```"])


def techniques(plan: str, lowest: bool = False) -> str:
    """What it comes to, and each technique's name, exactness and cost, without the reasons; if asked, the lowest that could be reached."""
    summary, _, rest = plan.strip("\n").partition("What it does, in this order\n")
    does = rest.partition("\n\n")[0].splitlines()
    kept = [line for line in does if re.match(_BYTES, line) or line.strip().startswith(EXACTNESS)]
    if lowest:
        kept += "".join(rest.partition("The lowest that can be reached")[1:]).partition("\n\n")[0].splitlines()
    return "\n".join(["```", *(line for line in summary.splitlines() if line.strip("─ ")), *kept, "```"])
