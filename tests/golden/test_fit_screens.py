"""The screens of plan, fit, check and levers, word for word. UPDATE_GOLDENS=1 writes the files anew; read the difference first."""

from __future__ import annotations

import importlib.metadata
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledgers import measured, predicted
from rich.cells import cell_len
from rich.console import Console

from memfit.records import EXACTNESS, Alternative, Plan, PlannedLever
from memfit.report.fit_terminal import print_check, print_fit, print_largest_batch, print_levers, print_plan
from memfit.report.fit_view import check_view, fit_view

PINNED_RICH = "15.0.0"  # another version may draw differently, so it may not write the files
MIB, GIB = 2**20, 2**30
_TOO_MUCH = "does not fit, whichever results are kept"


def plan() -> Plan:
    stays, again = "freed memory stays with the process otherwise", "until backward needs it: 528 MiB made again (most of it by silu)"
    kept = "activations of 8 samples are kept at once, 5.33 GiB at the peak; a micro-batch keeps 2"
    levers = (
        PlannedLever("allocator", "128 KiB and more given back at once", "bitwise", 0, None, {}, stays, 310 * MIB),
        PlannedLever("attention", "fused attention", "reordered", 0, -0.05, {}, "", 0),
        PlannedLever("microbatch", "4 micro-batches of 2", "reordered", 4 * GIB, 0.0, {}, kept, 5 * GIB),
        PlannedLever("saved", "46 results not kept", "bitwise", 528 * MIB, 2.09, {}, again),
    )
    lost = (
        Alternative("attention + microbatch", "fused [bold], 8 micro-batches of 1", "reordered", 3 * GIB, 1.1, "slower by 12 %"),
        Alternative("optimizer", "fused", "reordered", None, None, "slower by 4 % or more, whichever results are kept"),
        Alternative("saved", "nothing else", "bitwise", None, None, f"{_TOO_MUCH}: the peak stays 1.20 GiB too high, or more"),
        Alternative("nothing", "", "bitwise", 0, 0.0, "a fourth is in the record, and not on the screen"),
    )
    reachable = {"reordered": 592928500, "redrawn": 592928500, "rounded": 400 * MIB, "bitwise": 900 * MIB}
    told: dict[str, Any] = {"times": "measured", "gap": 0.034, "not_weighed": {"altered": "this step's variants are not simulated"}}
    told["estimated"] = ("redrawn", "rounded")
    return Plan(True, 2 * GIB, 1300 * MIB, 1900 * MIB, 1.124, "reordered", levers, lost, reachable, 8.8, **told)


def empty_plan() -> Plan:
    why = dict.fromkeys(EXACTNESS, "the step fits as it is")
    return Plan(True, 8 * GIB, 5 * GIB, 6 * GIB, 1.0, "bitwise", (), planning_seconds=0.5, not_weighed=why)


def untimed_plan() -> Plan:
    return replace(plan(), predicted_slowdown=None, alternatives=(), reachable_bytes={}, times="", gap=None, not_weighed={}, estimated=())


def fitted_inside(console: Console) -> None:
    actual, losses = replace(measured(), process_bytes=1950 * MIB), [f"0.{n}" for n in range(20)]
    print_fit(fit_view(predicted(), replace(predicted(), peak_bytes=GIB), actual, 2 * GIB, (1.124, "predicted"), losses), console)


def fitted_outside(console: Console) -> None:
    actual = replace(measured(), process_bytes=3 * GIB, step_seconds=None)
    print_fit(fit_view(predicted(), predicted(), actual, 2 * GIB, (1.0, "predicted"), ["1.5 + 2.25"]), console)


def growing_plan() -> Plan:
    return replace(untimed_plan(), levers=(), growth_bytes=3 * MIB, fits_steps=1366)


def fitted_growing(console: Console) -> None:
    actual = replace(measured(), process_bytes=1950 * MIB, process_high_bytes=1950 * MIB, growth_bytes=3 * MIB)
    print_fit(fit_view(predicted(), predicted(), actual, 2 * GIB, (1.0, "predicted"), ["0.5"]), console)


def checked_yes(console: Console) -> None:
    reason = "It fits 2.00 GiB: the process is predicted to take 1.00 GiB, at most 1.10 GiB."
    print_check(check_view(True, 2 * GIB, "cpu", reason, []), console)


def checked_no(console: Console) -> None:
    grown = [{"module": "encoder.[blocks].3", "bytes": 40 * MIB}, {"module": "", "bytes": MIB}]
    print_check(check_view(False, 2 * GIB, "cuda", "It does not fit 2.00 GiB.", grown), console)


def levers(console: Console) -> None:
    rows = [("saved", "bitwise", "nothing"), ("microbatch", "reordered", "a batch of 2 or more, and a loss that is a mean over samples")]
    print_levers(rows, console)


def largest(console: Console) -> None:
    print_largest_batch({"plain": 12, "without_microbatch": 40, "with_microbatch": 512, "tried_up_to": 512}, "6.00 GiB", console)


SCREENS: dict[str, Callable[[Console], None]] = {
    "plan": lambda console: print_plan(plan(), console),
    "plan_empty": lambda console: print_plan(empty_plan(), console),
    "plan_untimed": lambda console: print_plan(untimed_plan(), console),
    "plan_growing": lambda console: print_plan(growing_plan(), console),
    "fit_inside": fitted_inside,
    "fit_outside": fitted_outside,
    "fit_growing": fitted_growing,
    "check_yes": checked_yes,
    "check_no": checked_no,
    "levers": levers,
    "largest_batch": largest,
}


def screen(name: str, width: int = 80) -> str:
    out = io.StringIO()
    SCREENS[name](Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("name", SCREENS)
def test_screen_is_the_golden_one(name: str) -> None:
    golden = Path(__file__).with_name(f"{name}.txt")
    shown = screen(name)
    if os.environ.get("UPDATE_GOLDENS") == "1":
        assert importlib.metadata.version("rich") == PINNED_RICH, f"goldens are written with rich {PINNED_RICH} only"
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [200, 80, 60, 44])
@pytest.mark.parametrize("name", SCREENS)
def test_no_line_is_wider_than_the_terminal_or_80_columns(name: str, width: int) -> None:
    lines = screen(name, width).splitlines()
    assert max(cell_len(line) for line in lines) <= min(width, 80)
    assert not any(line != line.rstrip() for line in lines)


def test_a_plan_says_of_each_lever_what_it_saves_costs_and_is() -> None:
    shown = screen("plan")
    for words in ("4.00 GiB  microbatch: 4 micro-batches of 2", "bitwise, costs 2.1 s a step", "reordered, slower by 12 %", "fused [bold]"):
        assert words in shown
