"""A step with levers on, run from the reference's state and judged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from memfit.capture.rollback import rolled_back
from memfit.errors import MemfitError
from memfit.fitting.applying import apply_levers
from memfit.levers import CannotApply, Lever
from memfit.proof.checks import Check
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.observing import FittedRun, Outcome, feed, observe
from memfit.proof.reference import Reference
from memfit.proof.room import FILE, MEMORY
from memfit.proof.rules import RULES
from memfit.proof.sampling import Batches, first_samples
from memfit.proof.shelf import Key
from memfit.records import PlannedLever, loosest
from memfit.step.batches import batch_size, tensors_in

_SCALES = 16  # a scale that is halved so often is right for any type


@dataclass(frozen=True)
class Judgement:
    """What the rule of a plan's class found."""

    exactness: str
    run: FittedRun
    checks: tuple[Check, ...]

    @property
    def same(self) -> bool:
        """Whether nothing is out of bounds."""
        return all(check.holds for check in self.checks)

    @property
    def as_claimed(self) -> bool:
        """Whether it is what its class promises; another model promises no more than to run."""
        ran = not (self.run.outcome.failure or self.run.fed.failure)
        return ran if self.exactness == "altered" else self.same


def judge(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], place: str = MEMORY) -> Judgement:
    """Run the step with these levers and compare it with the reference, by the rule of the loosest of them.

    `place` is where what autograd keeps has room, beside what the levers see to.
    """
    exactness = loosest(lever.exactness for lever in rows)
    run = _run(reference, rows, levers, place)
    if failure := run.outcome.failure or run.fed.failure:
        return Judgement(exactness, run, (Check("run", f"the fitted step {failure}", float("inf"), 0.0),))
    return Judgement(exactness, run, tuple(RULES[exactness](reference, run)))


def _run(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], place: str) -> FittedRun:
    step, places = reference.step, reference.places
    unseen: set[Key] = set()
    exactness = loosest(lever.exactness for lever in rows)

    def trained() -> Outcome:
        outcome = _once_in_scale(reference, _batches(reference) if exactness == "altered" else reference.batches)
        in_backward = {p for o in step.running.steps_in_backward for group in o.param_groups for p in group["params"]}
        for kind, phase in itertools.product(("gradients", "later"), step.all_phases):
            keys = (key for key, parameter in places.gradients(step, phase, kind) if parameter in in_backward)
            unseen.update(key for key in keys if key not in outcome.shelf)
        return outcome

    def fitted(run: Callable[[], Outcome]) -> Outcome:
        try:
            with rolled_back(step), kept_in_file(step) if place == FILE else nullcontext(), apply_levers(step, rows, levers):
                return _or_its_failure(run)
        except CannotApply as no:
            return Outcome(failure=_told(no), refused=True)

    reference.plain  # noqa: B018  # it comes first: what it gives is needed below
    reference.progress("running the fitted step")
    outcome = fitted(trained)
    alone = exactness != "bitwise" and not outcome.failure  # equal bits of everything leave nothing to ask the optimizers
    fed = fitted(lambda: feed(step, places, reference.plain.shelf)) if alone else Outcome()
    exact = functools.cache(lambda: reference.first_step_in_float64(lambda: apply_levers(step, rows, levers)))
    return FittedRun(outcome, fed, frozenset(unseen), _eps(rows), exact)


def _batches(reference: Reference) -> Batches:
    """A variant may take samples of another size: then it gets its own."""
    step, plain = reference.step, reference.batches
    own = first_samples(step.batch, min(step.batch_size, batch_size(plain.batch)))
    if [(t.shape, t.dtype) for _, t in tensors_in(own)] == [(t.shape, t.dtype) for _, t in tensors_in(plain.batch)]:
        return plain
    return Batches(own, len(plain))


def _once_in_scale(reference: Reference, batches: Batches) -> Outcome:
    """A guard that scales losses may skip steps until its scale suits; it keeps what it learned, and the step starts anew."""
    skipped = 0
    for _ in range(_SCALES if reference.step.running.guard else 1):
        with rolled_back(reference.step):
            outcome = observe(reference.step, reference.places, batches)
        skipped += outcome.skipped
        if not outcome.skipped:
            break
    outcome.skipped = skipped
    return outcome


def _or_its_failure(run: Callable[[], Outcome]) -> Outcome:
    """A lever that breaks the step is a lever to blame, not an end of the proof, whatever it raises: the plain step has run before."""
    try:
        return run()
    except Exception as error:
        return Outcome(failure=_told(error))


def _told(error: Exception) -> str:
    words = str(error).splitlines()[0] if str(error) else ""
    return f"cannot be run: {words.rstrip('.')}" if isinstance(error, MemfitError) else f"raised {type(error).__name__}: {words}"


def _eps(rows: Sequence[PlannedLever]) -> float:
    """Of the coarsest type that a rounding lever names in its settings; bfloat16's where it names none."""
    types = [lever.settings.get("dtype", "bfloat16") for lever in rows if lever.exactness == "rounded"]
    known = [getattr(torch, str(name), torch.bfloat16) for name in types]
    return max((torch.finfo(kind).eps for kind in known if kind.is_floating_point), default=torch.finfo(torch.bfloat16).eps)
