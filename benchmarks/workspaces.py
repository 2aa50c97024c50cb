"""Forgets what operators were measured to take inside on this kind of machine, and measures it again over the zoo: `make workspaces`."""

from __future__ import annotations

from functools import partial

from rich.progress import track

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.capture.workspaces.remembered import measurements_file
from zoo import ROWS, make_step


def main() -> None:
    """One simulated step of every row."""
    measurements_file().unlink(missing_ok=True)
    for row in track(ROWS, "measuring"):
        memfit.profile(built_without_memory(partial(make_step, row)), simulate=True)
    print(measurements_file())


if __name__ == "__main__":
    main()
