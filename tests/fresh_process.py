"""Scripts in a process of their own, for what would last in the process of the other tests: malloc's thresholds, once set, move no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_a_fresh_process(script: str) -> Any:
    """What the script prints last, as JSON. It may import what tests import."""
    paths = [str(Path(__file__).parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n" + script], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])
