"""`--budget`: the same training loop, as it was written or fitted by memfit."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

import memfit
from memfit.records import EXACTNESS
from memfit.units import format_bytes

Train = Callable[[Any], float | dict[str, float]]


@dataclass(frozen=True)
class Original:
    """The step as it was written; called, saved and resumed as a fitted one is."""

    step: memfit.Step

    def __call__(self, batch: Any) -> float | dict[str, float]:
        """One training step: the loss, or each phase's by name."""
        losses = {name: float(loss) for name, loss in self.step.run(batch).items()}
        return losses if self.step.phases else losses[""]

    def state_dict(self) -> dict[str, Any]:
        """The scale of float16 losses, where the step itself has one."""
        guard = self.step.running.guard
        return {} if guard is None else {"guard": guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that scale."""
        if self.step.running.guard is not None:
            self.step.running.guard.load_state_dict(state["guard"])


def add_budget_flags(parser: argparse.ArgumentParser) -> None:
    """`--budget` and `--allow`, alike in every recipe."""
    parser.add_argument("--budget", default="none", help="what the process may take, as in 4GiB; none is the original training (default)")
    parser.add_argument("--allow", choices=EXACTNESS, default="reordered", help="the loosest exactness memfit may use")


def training_call(step: memfit.Step, budget: str, allow: str, console: Console, smaller_batch: Any = None) -> Original | memfit.Fitted:
    """`call(batch)` trains one step and gives its loss, or each phase's by name: the original, or the fitted one.

    What it has to remember is a part of the checkpoint: `folder.add("fitted", call)`. The proof is made on `smaller_batch` where the
    original does not fit the budget with even one sample.
    """
    if budget == "none":
        return Original(step)
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
