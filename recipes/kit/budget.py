"""`--budget`: the same training loop, as it was written or fitted by memfit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

import memfit
from memfit.units import format_bytes

Train = Callable[[Any], float | dict[str, float]]


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """`--budget` and `--allow`, alike in every recipe."""
    parser.add_argument("--budget", default="none", help="what the process may take, as in 4GiB; none is the original training (default)")
    parser.add_argument("--allow", default="reordered", help="the loosest exactness memfit may use: bitwise, reordered, rounded, altered")


def training_call(step: memfit.Step, budget: str, allow: str, console: Console, smaller_batch: Any = None) -> Train:
    """`call(batch)` trains one step and gives its loss, or each phase's by name: the original, or the fitted one.

    The proof is made on `smaller_batch` where the original does not fit the budget with even one sample.
    """
    if budget == "none":
        return _plain(step)
    with console.status("memfit: profiling") as status:
        fitted = memfit.fit(
            step, budget, allow=allow, smaller_batch=smaller_batch, progress=lambda words: status.update(f"memfit: {words}")
        )
    sizes = f"{format_bytes(fitted.baseline.process_bytes)} → {format_bytes(fitted.plan.predicted_process_bytes)} predicted"
    console.print(f"memfit: {levers_in_words(fitted.plan)}; {sizes}; {proof_in_words(fitted.verdict)}")
    return fitted


def levers_in_words(plan: memfit.Plan) -> str:
    """What a plan does."""
    return " + ".join(f"{lever.name}: {lever.option}" for lever in plan.levers) or "nothing to do"


def proof_in_words(verdict: memfit.Verdict) -> str:
    """Its class, and whether it was proven."""
    if verdict.equivalent:
        return f"{verdict.exactness}, proven"
    return f"{verdict.exactness}, {'not proven' if verdict.not_compared else 'not the same training'}"


def _plain(step: memfit.Step) -> Train:
    def train(batch: Any) -> float | dict[str, float]:
        losses = {name: float(loss) for name, loss in step.run(batch).items()}
        return losses if step.phases else losses[""]

    return train
