"""Some levers of a plan, put on a step and compared with the step without them: one verdict."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from memfit.fitting.applying import option_of
from memfit.levers import Lever
from memfit.proof.checks import worst_of
from memfit.proof.culprit import Blame, blame_for
from memfit.proof.determinism import deterministic
from memfit.proof.fewer_parts import least_samples, levers_for
from memfit.proof.fitted import Judgement, judge
from memfit.proof.fitting_sample import Sample, sample_inside
from memfit.proof.limit import Limit
from memfit.proof.notes import BY_DESIGN, FITTED_IN_FILE, left_out, notes_on
from memfit.proof.observing import Outcome
from memfit.proof.reference import Reference
from memfit.proof.room import FILE, MEMORY
from memfit.proof.separable import why_not_separable
from memfit.records import COMPARED, Ledger, PlannedLever, Verdict, Worst, loosest
from memfit.step import Batch, Step


@dataclass(frozen=True)
class Terms:
    """How a proof is to be made."""

    steps: int
    limit: Limit | None
    smaller_batch: Batch
    levers: Mapping[str, Lever]
    progress: Callable[[str], None]


def compare(step: Step, rows: Sequence[PlannedLever], terms: Terms, plain: Ledger | None = None) -> Verdict:
    """The verdict on these levers, by the rule of the loosest; `plain` is the plain step's ledger where it is known already."""
    started = time.perf_counter()
    exactness = loosest(lever.exactness for lever in rows)
    sample = sample_inside(step, terms.limit, exactness, plain, terms.smaller_batch, least_samples(rows, step.batch_size))
    seen = levers_for(rows, step.batch_size, sample.step.batch_size)
    place = MEMORY
    if sample.room:
        place, room = sample.room.for_plan(sample.step, seen, terms.levers)
        sample = replace(sample, room=room)
    reference = Reference(sample, terms.steps, terms.progress)
    with deterministic():
        judgement = judge(reference, seen, terms.levers, place)
        blame = _to_blame(judgement, reference, seen, terms)
    missing = tuple(lever.name for lever in rows if lever.name not in {row.name for row in seen})
    filed = (FITTED_IN_FILE,) if place == FILE else ()
    notes = (*sample.notes, *filed, *left_out(missing, seen, sample.step.batch_size), *notes_on(reference, judgement, blame))
    verdict = _verdict(seen, reference, judgement, blame.lever, notes, time.perf_counter() - started)
    if blame.lever == "microbatch" and not judgement.as_claimed:
        verdict = replace(verdict, culprit_because=_why_not_divided(sample, seen))
    if sample.in_file:
        verdict = replace(verdict, step_seconds={})  # the file took part of the reference's time
    by_design = judgement.as_claimed and any(row.exactness in BY_DESIGN for row in rows)
    return replace(verdict, not_compared=missing, equivalent=verdict.equivalent and not (missing or by_design), by_design=by_design)


def _to_blame(judgement: Judgement, reference: Reference, rows: Sequence[PlannedLever], terms: Terms) -> Blame:
    """What failed; where nothing did, what makes it another training by design."""
    if not judgement.as_claimed:
        terms.progress("looking for the lever to blame")
        return blame_for(reference, rows, terms.levers)
    return Blame(", ".join(lever.name for lever in rows if lever.exactness in BY_DESIGN))


def _why_not_divided(sample: Sample, rows: Sequence[PlannedLever]) -> str:
    """Whether it is the loss, asked where there is room for more gradients; the verdict stands without the answer."""
    row = next(lever for lever in rows if lever.name == "microbatch")
    with suppress(Exception):
        return why_not_separable(sample.step, option_of(row)) if sample.float64 else ""
    return ""


def _verdict(
    rows: Sequence[PlannedLever], reference: Reference, judgement: Judgement, culprit: str, notes: tuple[str, ...], seconds: float
) -> Verdict:
    counts: Counter[str] = Counter()
    for check in judgement.checks:
        counts[check.kind] += check.count
    worst = worst_of(judgement.checks)
    plain, fitted = reference.plain.losses, judgement.run.outcome.losses
    return Verdict(
        judgement.same and judgement.exactness not in BY_DESIGN,
        judgement.exactness,
        {"reference": _total(plain), "fitted": _total(fitted)},
        Worst(worst.what, _finite(worst.error), _finite(worst.bound)),
        {kind: counts[kind] for kind in COMPARED},
        tuple(lever.name for lever in rows),
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
