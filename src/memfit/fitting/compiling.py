"""torch.compile, tried on a step before a plan may use it: its peak measured, its training proven the same, its seconds weighed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from memfit.capture.process import memory_left
from memfit.capture.unwatched import Unwatched, run_unwatched
from memfit.errors import MemfitError
from memfit.fitting.applying import apply_levers, refuse_fitted
from memfit.levers.compile import CompileLever
from memfit.profiling import profile
from memfit.proof import verify
from memfit.records import Ledger, Option, Plan, PlannedLever
from memfit.step import Step
from memfit.step.fingerprint import fingerprint
from memfit.torch_private import compiler_failures
from memfit.units import format_bytes, format_seconds


def measured_compile(step: Step, *, run_steps: int, progress: Callable[[str], None] = lambda words: None) -> CompileLever:
    """The compile lever with the options that passed, for `memfit.plan(…, levers=LEVERS | {"compile": this})`.

    The plain and the compiled step are really run, at full size, and rolled back: minutes of compiling. `run_steps` is how long the
    training will be, over which the compiler's seconds are spread.
    """
    if run_steps < 1:
        raise MemfitError(f"A training of {run_steps} steps has nothing to compile for: give the number of steps it will have.")
    refuse_fitted(step)
    ledger = profile(step, simulate=True, progress=progress)
    candidates = CompileLever().candidates(ledger)
    if not candidates:
        return CompileLever([])
    _refuse_without_room(ledger)
    tried = partial(_tried, step, run_unwatched(step, progress), run_steps, progress)
    found: list[Option] = []
    for _, family in groupby(candidates, lambda option: option.settings["modules"]):
        whole = list(while_it_helps(family, tried))
        found += [*whole, *(part for option in whole[:1] for part in while_it_helps(CompileLever().in_parts(option, ledger), tried))]
    return CompileLever(found)


def _refuse_without_room(plain: Ledger) -> None:
    """What is compiled is measured beside the plain step, and nobody knows its memory before.

    Held to the machine, not to a budget: where the plain step is inside the budget, no plan is wanted.
    """
    room = memory_left()
    if plain.device == "cpu" and plain.process_high_bytes > room:
        raise MemfitError(
            f"What compiling gives is measured beside the plain step, which may take up to {format_bytes(plain.process_high_bytes)}, and "
            f"this machine has {format_bytes(room)} for it. Leave out compile, or measure it where the plain step fits."
        )


def while_it_helps(family: Iterable[Option], tried: Callable[[Option], Option | None]) -> Iterator[Option]:
    """The options of one family that passed, down to the first budget which fails or takes no less than one before it.

    Below such a one it is seldom worth minutes of compiling: on five models one lower budget was right and took less, and it was slower.
    """
    least = math.inf
    for option in family:
        found = tried(option)
        if found is not None:
            yield found
        peak = math.inf if found is None else found.settings["measured_peak_bytes"]
        if peak >= least:
            return
        least = peak


def _tried(step: Step, plain: Unwatched, run_steps: int, progress: Callable[[str], None], option: Option) -> Option | None:
    """The option with what was measured; None where it does not compile, or is not the same training."""
    row = PlannedLever(option.lever, option.name, option.exactness, settings=option.settings)
    progress(f"compiling {option.name}")
    torch.compiler.reset()  # what was compiled for another batch size would make this one's sizes variable
    try:
        with apply_levers(step, [row]):
            found = run_unwatched(step)
    except compiler_failures() as error:
        inside = getattr(error, "inner_exception", error)
        progress(f"{option.name} does not compile: {type(inside).__name__}: {str(inside).partition(chr(10))[0]}")
        return None
    progress(f"verifying {option.name}, compiled")
    if not verify(step, Plan(True, 0, found.peak_bytes, 0, None, option.exactness, (row,), step=fingerprint(step))).equivalent:
        progress(f"{option.name} is not the same training: left out")
        return None
    compiling = max(0.0, found.first_seconds - found.seconds)
    slowdown = (found.seconds + compiling / run_steps) / plain.seconds
    measured = {
        "measured_peak_bytes": found.peak_bytes,
        "measured_seconds": found.seconds,
        "measured_slowdown": slowdown,
        "compile_seconds": compiling,
        "run_steps": run_steps,
    }
    why = (
        f"measured, and proven the same: compiling takes {format_seconds(compiling)}, a step {found.seconds / plain.seconds:.2f} of the "
        f"plain one's time; over {run_steps} steps together {slowdown:.2f}"
    )
    return replace(option, settings=option.settings | measured, why=why)
