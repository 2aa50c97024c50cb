"""`memfit.verify`: whether a fitted step is still the same training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memfit.errors import NotEquivalent, NotProven
from memfit.fitting.applying import apply_levers, refuse_another_step, refuse_damaged, refuse_fitted
from memfit.levers import LEVERS, Lever
from memfit.proof.comparing import Terms, compare
from memfit.proof.limit import Limit, limit_of_machine
from memfit.proof.notes import BY_DESIGN
from memfit.records import Ledger, Plan, PlannedLever, Verdict
from memfit.restoring import random_numbers_restored
from memfit.step import Batch, Step


def verify(
    step: Step,
    plan: Plan,
    *,
    steps: int = 3,
    limit_bytes: int | None = None,
    smaller_batch: Batch = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> Verdict:
    """Run the plain and the fitted step from the same state, compare what they do, and put everything back.

    `limit_bytes` is what the process may take (without it, what this machine has left for a step on a CPU): a plain step that
    needs more is compared on fewer samples, or on `smaller_batch` (smaller volumes, shorter sequences) where even one sample needs more.

    >>> import torch
    >>> from memfit.step.fingerprint import fingerprint
    >>> net = torch.nn.Linear(4, 1)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))
    >>> verdict = verify(step, Plan(True, 2**30, 0, 0, 1.0, "bitwise", (), step=fingerprint(step)))
    >>> verdict.equivalent, verdict.compared["gradients"]
    (True, 2)
    """
    limit = limit_of_machine(step) if limit_bytes is None else Limit(limit_bytes)
    return prove(step, plan, None, steps, limit, smaller_batch, levers, progress)


def prove(
    step: Step,
    plan: Plan,
    plain: Ledger | None,
    steps: int,
    limit: Limit | None,
    smaller_batch: Batch,
    levers: Mapping[str, Lever],
    progress: Callable[[str], None],
) -> Verdict:
    """What `verify` does; `plain` is the plain step's ledger where it is known already."""
    refuse_fitted(step)
    refuse_another_step(step, plan)
    refuse_damaged(plan)
    terms = Terms(steps, limit, smaller_batch, levers, progress)
    others = [lever for lever in plan.levers if lever.exactness not in BY_DESIGN]
    if not others or len(others) == len(plan.levers):
        return compare(step, plan.levers, terms, plain)
    try:
        beside = _compared_beside(step, plan.levers, others, terms, plain)
    except Exception:  # the step as it was altered may not run at all, which is for the verdict on all of them to say
        verdict = compare(step, plan.levers, terms, plain)
        if verdict.by_design:
            raise
        return verdict
    return _together(compare(step, plan.levers, terms, plain), beside) if beside.equivalent else beside


def _compared_beside(
    step: Step, rows: Sequence[PlannedLever], others: Sequence[PlannedLever], terms: Terms, plain: Ledger | None
) -> Verdict:
    """The levers that promise the same training, without those that draw other numbers, and on the step that was altered."""
    asked = [lever for lever in rows if lever not in others]
    altered = [lever for lever in asked if lever.exactness == "altered"]
    with random_numbers_restored(), apply_levers(step, altered, terms.levers):
        verdict = compare(step, others, terms, None if altered else plain)
    how = f"with {_names(altered)} on both sides" if altered else f"without {_names(asked)}"
    return replace(verdict, notes=(*verdict.notes, f"{_names(others)} was held to {verdict.exactness} {how}."))


def _names(levers: Sequence[PlannedLever]) -> str:
    return ", ".join(lever.name for lever in levers)


def _together(asked: Verdict, beside: Verdict) -> Verdict:
    """What was asked for is another training by design; the levers beside it were proven on their own."""
    compared = {kind: max(count, beside.compared.get(kind, 0)) for kind, count in asked.compared.items()}
    return replace(
        asked, compared=compared, notes=tuple(dict.fromkeys((*asked.notes, *beside.notes))), seconds=asked.seconds + beside.seconds
    )


def require(verdict: Verdict) -> Verdict:
    """The verdict itself if it is a yes; otherwise NotEquivalent is raised, or NotProven where not all could be compared.

    >>> from memfit.records import Worst
    >>> yes = Verdict(True, "bitwise", {}, Worst("", 0.0, 0.0), {})
    >>> require(yes) is yes
    True
    """
    if verdict.unproven:
        told = next(note for note in verdict.notes if note.startswith(verdict.not_compared))
        raise NotProven(told, verdict)
    if not verdict.equivalent:
        raise NotEquivalent(verdict.worst.what, verdict.worst.error, verdict.worst.bound, verdict.culprit, verdict)
    return verdict
