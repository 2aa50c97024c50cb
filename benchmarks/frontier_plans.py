"""memfit's plans as ways of the frontier: the fastest exact ones under limits of the peak, and the lowest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import memfit
from frontier_ways import Way
from memfit.capture.speeds import speeds_here
from memfit.fitting.applying import apply_levers
from memfit.fitting.captured_lever import with_captured
from memfit.fitting.compiling import measured_compile
from memfit.fitting.plan_rows import options_of, rows_of
from memfit.fitting.timed_ledgers import seen_with_times
from memfit.levers import LEVERS
from memfit.planner.proposing import Proposer
from memfit.records import PlannedLever

_MEMFIT = ("saved", "microbatch", "attention")
_RUN_STEPS = 10_000  # over which a compiler's seconds are spread


def memfit_ways(step: memfit.Step, limits: list[int], note: Callable[[str], None], compiling: bool) -> Iterator[Way]:
    """The planner's fastest exact eager plan under each limit of the peak above what is there before the step; then those with compile.

    Where a limit is out of reach, the lowest peak there is.
    """
    ledger = seen_with_times(step)
    assert ledger.trace is not None
    before = sum(s.bytes for s in ledger.trace.storages if s.born < 0)
    levers = with_captured({name: LEVERS[name] for name in _MEMFIT}, step, ledger, seen_with_times, "reordered")
    proposer = Proposer(ledger, levers, "reordered", speeds_here())
    eager = list(_planned_ways("memfit", step, proposer, before, limits, note))
    yield from eager if len(eager) == len(limits) else [*eager, _lowest_way(step, proposer, before)]
    if compiling:
        levers |= {"compile": measured_compile(step, run_steps=_RUN_STEPS, progress=note)}
        proposer = Proposer(ledger, levers, "reordered", speeds_here())
        allowed = _planned_ways("memfit, compile allowed", step, proposer, before, limits, note)
        yield from {way.name: way for way in allowed if way.name.startswith("compile")}.values()  # the others are the ones above


def _planned_ways(
    family: str, step: memfit.Step, proposer: Proposer, before: int, limits: list[int], note: Callable[[str], None]
) -> Iterator[Way]:
    for limit in limits:
        started = time.monotonic()
        rows = _surely_inside(step, proposer, before + limit)
        if rows is None:
            note(f"{family}: no exact plan is inside {limit / 2**20:.0f} MiB")
            continue
        yield _way(family, step, rows, limit, time.monotonic() - started)


def _surely_inside(step: memfit.Step, proposer: Proposer, most: int) -> list[PlannedLever] | None:
    """As `memfit.plan` does it: the fastest plan, captured once more, whose peak stays inside up to the upper end of its interval."""
    limit = most
    while found := proposer.propose(lambda combination, most=limit: most, 5.0).fitting:
        rows = rows_of(options_of(found[0]))
        if any(row.name == "compile" for row in rows):  # its peak was measured
            return rows
        if (high := _captured(step, rows)) <= most:
            return rows
        limit = min(limit, found[0].peak_bytes) - (high - most)
    return None


def _lowest_way(step: memfit.Step, proposer: Proposer, before: int) -> Way:
    """The plan with the lowest peak of all; its limit is the upper end of that."""
    started = time.monotonic()
    found = proposer.lowest("reordered", 5.0)
    assert found is not None
    fastest = proposer.propose(lambda combination: found.peak_bytes, 5.0).fitting
    rows = rows_of(options_of(fastest[0] if fastest else found))
    return _way("memfit", step, rows, _captured(step, rows) - before, time.monotonic() - started)


def _way(family: str, step: memfit.Step, rows: list[PlannedLever], limit: int, seconds: float) -> Way:
    name = " + ".join(f"{row.name}: {row.option}" for row in rows) or "nothing to do"
    return Way(family, name, partial(_fitted, step, rows), limit, set_up_seconds=seconds)


def _captured(step: memfit.Step, rows: list[PlannedLever]) -> int:
    """The upper end of the peak of a step with these levers, simulated."""
    with apply_levers(step, rows):
        return memfit.profile(step, simulate=True).high_bytes


@contextmanager
def _fitted(step: memfit.Step, rows: list[PlannedLever]) -> Iterator[memfit.Step]:
    with apply_levers(step, rows):
        yield step
