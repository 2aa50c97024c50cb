"""`memfit.verify`: whether a fitted step is still the same training."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from memfit.applying import option_of, refuse_another_step, refuse_damaged, refuse_fitted
from memfit.errors import NotEquivalent, NotProven
from memfit.levers import LEVERS, Lever
from memfit.proof.checks import worst_of
from memfit.proof.culprit import culprit_of
from memfit.proof.determinism import deterministic
from memfit.proof.fewer_parts import least_samples, levers_for
from memfit.proof.fitted import Judgement, judge
from memfit.proof.fitting_sample import Sample, sample_inside
from memfit.proof.limit import Limit, limit_of_machine
from memfit.proof.observing import Outcome
from memfit.proof.reference import Reference
from memfit.proof.separable import why_not_separable
from memfit.records import Ledger, Plan, PlannedLever, Verdict, Worst, loosest
from memfit.step import Batch, Step

_BY_DESIGN = {
    "altered": "Not equivalent by design: {} changes the model or the training. The figures say by how much, and excuse nothing.",
    "redrawn": "Equivalent in distribution only: {} draws other random numbers, so losses and gradients cannot be compared. "
    "Optimizers and counters were.",
}
_COMPARED = ("gradients", "buffers", "rng", "optimizer_state", "parameters")


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
    >>> from memfit.fingerprint import fingerprint
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
    started = time.perf_counter()
    refuse_fitted(step)
    refuse_another_step(step, plan)
    refuse_damaged(plan)
    claimed = loosest(lever.exactness for lever in plan.levers)
    sample = sample_inside(step, limit, claimed == "reordered", plain, smaller_batch, least_samples(plan.levers, step.batch_size))
    planned = levers_for(plan.levers, step.batch_size, sample.step.batch_size)
    reference = Reference(sample.step, steps, sample.float64, progress, sample.in_file)
    with deterministic():
        judgement = judge(reference, planned, levers)
        shown = judgement.exactness
        culprit = ", ".join(lever.name for lever in planned if shown in _BY_DESIGN and lever.exactness == shown)
        if not judgement.same and not culprit:
            progress("looking for the lever to blame")
            culprit = culprit_of(reference, planned, levers)
    left_out = tuple(lever.name for lever in plan.levers if lever.name not in {row.name for row in planned})
    notes = (*sample.notes, *_left_out(left_out, planned, sample.step.batch_size), *_notes(reference, judgement, culprit))
    verdict = _verdict(planned, reference, judgement, culprit, notes, time.perf_counter() - started)
    if culprit == "microbatch" and not judgement.same:
        verdict = replace(verdict, culprit_because=_why_not_divided(sample, planned))
    if sample.in_file:
        verdict = replace(verdict, step_seconds={})  # the file took part of the reference's time
    return replace(verdict, not_compared=left_out, equivalent=False) if left_out else verdict


def _why_not_divided(sample: Sample, planned: Sequence[PlannedLever]) -> str:
    """Whether it is the loss, asked where there is room for more gradients; the verdict stands without the answer."""
    row = next(lever for lever in planned if lever.name == "microbatch")
    with suppress(Exception):
        return why_not_separable(sample.step, option_of(row)) if sample.float64 else ""
    return ""


def _left_out(names: Sequence[str], planned: Sequence[PlannedLever], samples: int) -> Iterator[str]:
    """What has to be said where a lever of the plan could not be on."""
    if not names:
        return
    nothing = "The other levers were." if planned else "It is all the plan does, so nothing was proven."
    few = "a single sample cannot be divided, and two" if samples == 1 else f"{samples} samples are too few for it to divide, and more"
    yield (
        f"{', '.join(names)} was not compared, and nothing is claimed of it: {few} do not fit the limit. {nothing} Give a larger limit or "
        "budget, or write the plan (memfit plan -o) and verify it where there is more memory; in Python a smaller_batch (smaller volumes, "
        "shorter sequences) to compare on helps as well."
    )


def require(verdict: Verdict) -> Verdict:
    """The verdict itself if it is a yes; otherwise NotEquivalent is raised, or NotProven where not all could be compared.

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


def _verdict(
    planned: Sequence[PlannedLever], reference: Reference, judgement: Judgement, culprit: str, notes: tuple[str, ...], seconds: float
) -> Verdict:
    counts: Counter[str] = Counter()
    for check in judgement.checks:
        counts[check.kind] += check.count
    worst = worst_of(judgement.checks)
    plain, fitted = reference.plain.losses, judgement.run.outcome.losses
    return Verdict(
        judgement.same and judgement.exactness not in _BY_DESIGN,
        judgement.exactness,
        {"reference": _total(plain), "fitted": _total(fitted)},
        Worst(worst.what, _finite(worst.error), _finite(worst.bound)),
        {kind: counts[kind] for kind in _COMPARED},
        tuple(lever.name for lever in planned),
        culprit,
        {"reference": _as_record(plain), "fitted": _as_record(fitted)},
        notes,
        seconds,
        samples=reference.step.batch_size,
        step_seconds=_step_seconds(reference.plain, judgement.run.outcome),
    )


def _step_seconds(plain: Outcome, fitted: Outcome) -> dict[str, float]:
    found = {"reference": plain.step_seconds, "fitted": fitted.step_seconds}
    known = {name: seconds for name, seconds in found.items() if seconds is not None}
    return known if len(known) == len(found) else {}


def _finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def _total(losses: list[dict[str, float]]) -> float | None:
    """Of the first step; there is none when it failed."""
    return _finite(sum(losses[0].values())) if losses else None


def _as_record(losses: list[dict[str, float]]) -> tuple[dict[str, float | None], ...]:
    return tuple({name: _finite(loss) for name, loss in of_step.items()} for of_step in losses)


def _notes(reference: Reference, judgement: Judgement, culprit: str) -> Iterator[str]:
    """What a reader has to know to judge the verdict."""
    if judgement.exactness in _BY_DESIGN:
        yield _BY_DESIGN[judgement.exactness].format(culprit)
    if judgement.exactness == "reordered" and reference.exact.failure:
        yield (
            f"There was no float64 run to compare with: {reference.exact.failure}. Gradients were held to 3 times what a last bit "
            "more or less in parameters and modules' outputs does to the plain step, or to 3e-5 of their norm."
        )
    if loose := max((check.loose for check in judgement.checks), default=0.0):
        why = f"({judgement.run.exact().failure}) " if not reference.exact.failure else ""
        yield (
            f"A rough comparison: without a float64 run of both steps {why}gradients were held to no more than {loose:.2g} of their norm, "
            "which is what rounding does to this step. A lever that is less wrong than that is not seen."
        )
    if judgement.exactness == "bitwise" and reference.found_unsteady:
        yield "Two runs of the plain step differ already, so bits cannot be compared: the fitted one was held to 3 times that distance."
    if judgement.exactness == "rounded":
        yield (
            f"Rounded, with eps {judgement.run.eps:.2g}: loss and gradients were held to 3 times what eps more or less in parameters "
            "and modules' outputs does to the plain step, or 12 eps of their norm; updates on equal gradients to 12 eps. "
            "States of optimizers were not compared."
        )
    if reference.why_one_batch:
        yield f"All steps ran on the same batch: with its samples in another order the plain step fails ({reference.why_one_batch})."
    if skipped := judgement.run.outcome.skipped:
        steps = f"{skipped} step{'s' * (skipped > 1)}"
        yield f"A guard skipped {steps} for numbers that were not finite, as it found its scale: the comparison started anew each time."
    if unseen := sum(key.kind == "gradients" for key in judgement.run.unseen):
        gone = f"{unseen} gradient{'s' * (unseen > 1)}"
        yield f"{gone} could not be seen before being freed inside backward: parameters and states were compared."
    if any(phase.schedulers for phase in reference.step.all_phases):
        yield "Schedulers stood still during the comparison."
    if not judgement.same and not culprit:
        yield "No single lever could be blamed: each is right on its own and the plan stays wrong without any one of them."
