"""`memfit.fit`: a step made to fit a budget, proven to be the same training, and ready to run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.capture.process import base_bytes
from memfit.errors import Infeasible, MemfitError
from memfit.fitting.applying import apply_plan
from memfit.fitting.proven_plans import ProvenPlans
from memfit.levers import LEVERS, Lever, Undo
from memfit.records import Ledger, Plan, Verdict
from memfit.step import Batch, Step
from memfit.units import format_bytes, parse_bytes

_TRIES = 3  # plans, where planning and proving have made the process itself grow


@dataclass
class Fitted:
    """A step with a plan's levers on. Call it with a batch to train; `undo()` gives the plain step back."""

    step: Step
    plan: Plan
    verdict: Verdict
    baseline: Ledger  # the plain step, predicted
    ledger: Ledger  # the fitted step, predicted
    _undo: Undo = field(repr=False)
    _on: bool = field(default=True, repr=False)

    def __call__(self, batch: Batch) -> float | dict[str, float]:
        """One training step: zero_grad, every phase, clip, step, scheduler. The loss, or each phase's by name."""
        self._refuse_after_undo()
        losses = {name: float(loss) for name, loss in self.step.run(batch).items()}
        return losses if self.step.phases else losses[""]

    def backward(self, batch: Batch) -> float:
        """Gradients only, added to those that are there, for a loop of your own; the loss."""
        self._refuse_after_undo()
        self._refuse_backward_alone()
        loss = float(self.step.differentiate(self.step.all_phases[0], batch))
        for call in self.step.running.after_step:  # what is given back then is free by now; the optimizer's own is with the next batch's
            call()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs beside the states of models, optimizers and schedulers: the scale of float16 losses."""
        guard = self.step.running.guard
        return {} if guard is None else {"guard": guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave; a step fitted in another way is refused."""
        guard = self.step.running.guard
        if (guard is None) != ("guard" not in state):
            here, there = ("no", "one") if guard is None else ("a", "none")
            raise MemfitError(
                f"This fitted step has {here} guard of its losses, and the saved one had {there}: fit it with the plan it had."
            )
        if guard is not None:
            guard.load_state_dict(state["guard"])

    def undo(self) -> None:
        """Take the levers off again; what was trained meanwhile stays. Called again, it does nothing."""
        self._on = False
        self._undo()

    def _refuse_after_undo(self) -> None:
        if not self._on:
            raise MemfitError("This fitted step was undone, so nothing keeps it inside its budget: fit the step again.")

    def _refuse_backward_alone(self) -> None:
        """Where gradients alone are not what a loop of one's own could go on with."""
        running, names = self.step.running, [phase.name for phase in self.step.all_phases]
        if len(names) > 1:
            why = f"This step has phases ({', '.join(names)}), and each needs the one before it to have stepped"
        elif running.steps_in_backward:
            why = "An optimizer of this step takes its step inside backward, so no gradients are left to look at"
        elif running.guard:
            why = "This step's loss is scaled, and so are its gradients until the optimizer steps"
        else:
            return
        raise MemfitError(f"{why}: call fitted(batch), which does all of it.")


def fit(
    step: Step,
    budget: str | int,
    *,
    plan: Plan | None = None,
    allow: str = "reordered",
    host_budget: str | int | None = None,
    smaller_batch: Batch = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> Fitted:
    """Profile, plan, verify and apply: the step, changed in place to stay inside the budget and still be the same training.

    The plain step is run only on as many samples as are predicted to stay inside the budget, and on `smaller_batch` (smaller volumes,
    shorter sequences) where not even one does. A lever that fails the proof is left out, and what is left is planned again. A `plan` made
    before, as one from a file, is taken as it is, and refused where it is for another step, is not allowed, fails the proof, or does
    not fit.

    >>> import torch
    >>> net = torch.nn.Linear(4, 1)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))
    >>> fitted = fit(step, "8GiB")
    >>> loss = fitted(torch.ones(3, 4))
    >>> fitted.verdict.equivalent, fitted.plan.levers, fitted(torch.ones(3, 4)) < loss
    (True, (), True)
    >>> fitted.undo()
    """
    search = ProvenPlans(step, budget, plan, {"allow": allow, "host_budget": host_budget}, smaller_batch, levers, progress)
    for _ in range(_TRIES):
        found, verdict = search.next()
        high = _high_by_now(step, found.fitted)
        if high <= parse_bytes(budget):
            return Fitted(step, found.plan, verdict, found.plain, found.fitted, apply_plan(step, found.plan, levers))
    raise Infeasible(
        f"This process grows while it is planned for: after the plan and its proof the step would take up to {format_bytes(high)}, and "
        f"the budget is {format_bytes(parse_bytes(budget))}. Fit before other threads of the program begin their work, or give a larger "
        "budget.",
        high,
        {},
    )


def _high_by_now(step: Step, fitted: Ledger) -> int:
    """The upper end of the fitted step's process after planning and proof, which may leave something behind that was not there before."""
    gc.collect()
    grown = base_bytes(step) - fitted.process.base_bytes if fitted.device == "cpu" else 0
    return fitted.process_high_bytes + max(0, grown)
