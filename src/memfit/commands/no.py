"""An honest no for scripts: with --json one object on standard output, with the keys that a yes would have, null where nothing ran."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click

from memfit.commands.screen import stdout_for_json
from memfit.errors import Infeasible, NotEquivalent
from memfit.records import COMPARED, Ledger, Plan, Verdict, Worst

_OF_A_RUN = ("baseline", "slowdown", "slowdown_is", "slowdown_on_sample", "steps", "losses", "fits_steps")


@contextlib.contextmanager
def answer_for_json(schema: str, budget: int) -> Iterator[None]:
    """Standard output is for the answer alone; a no prints what was planned, what the proof found and why, and exits as it would."""
    try:
        with stdout_for_json():
            yield
    except (Infeasible, NotEquivalent) as no:
        plan = no_plan(no, budget) if no.plan is None and isinstance(no, Infeasible) else no.plan and no.plan.to_dict()
        verdict = no.verdict.to_dict() if isinstance(no, NotEquivalent) and no.verdict else None
        nothing = dict.fromkeys((*Ledger.saved_keys(), *_OF_A_RUN))
        click.echo(json.dumps({"schema": schema} | nothing | {"plan": plan, "verdict": verdict, "reason": str(no)}))
        raise click.exceptions.Exit(no.exit_code) from no


def no_plan(no: Infeasible, budget: int) -> dict[str, Any]:
    """A plan's keys where there is none; `lowest_bytes` is the upper end of the lowest process that could be reached."""
    none = Plan(False, budget, 0, 0, None, "bitwise", (), reachable_bytes={**no.reachable_bytes}).to_dict()
    none |= {"predicted_peak_bytes": None, "predicted_process_bytes": None, "exactness": None}
    return none | {"lowest_bytes": no.lowest_bytes, "reason": str(no)}


def no_verdict(no: Infeasible, plan: Plan) -> dict[str, Any]:
    """A verdict's keys where there is no room to compare anything: nothing was found wrong, and nothing is proven."""
    losses: dict[str, float | None] = {"reference": None, "fitted": None}
    counts, left_out = dict.fromkeys(COMPARED, 0), tuple(lever.name for lever in plan.levers)
    nothing = Verdict(False, plan.exactness, losses, Worst("nothing", 0.0, 0.0), counts, notes=(str(no),), not_compared=left_out)
    return nothing.to_dict() | {"lowest_bytes": no.lowest_bytes, "reason": str(no)}
