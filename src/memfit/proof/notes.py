"""What a reader has to know to judge a verdict, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.proof.culprit import Blame
from memfit.proof.fitted import Judgement
from memfit.proof.reference import Reference
from memfit.records import PlannedLever

BY_DESIGN = {
    "altered": "Not equivalent by design: {} changes the model or the training. The figures say by how much, and excuse nothing.",
    "redrawn": "Equivalent in distribution only: {} draws other random numbers, so losses and gradients cannot be compared. "
    "Optimizers and counters were.",
}
FITTED_IN_FILE = "What autograd keeps of the fitted step, beside what its levers see to, waited in a file too: it would not fit the limit."


def notes_on(reference: Reference, judgement: Judgement, blame: Blame) -> Iterator[str]:
    """How it was compared, and what could not be."""
    if judgement.exactness in BY_DESIGN and judgement.as_claimed:
        yield BY_DESIGN[judgement.exactness].format(blame.lever)
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
        yield f"All steps ran on the same batch: {reference.why_one_batch}."
    if skipped := judgement.run.outcome.skipped:
        steps = f"{skipped} step{'s' * (skipped > 1)}"
        yield f"A guard skipped {steps} for numbers that were not finite, as it found its scale: the comparison started anew each time."
    if unseen := sum(key.kind == "gradients" for key in judgement.run.unseen):
        gone = f"{unseen} gradient{'s' * (unseen > 1)}"
        yield f"{gone} could not be seen before being freed inside backward: parameters and states were compared."
    if any(phase.schedulers for phase in reference.step.all_phases):
        yield "Schedulers stood still during the comparison."
    if not judgement.as_claimed and not blame.lever and blame.untried:
        yield "No single lever could be blamed: without some of them the step is not predicted to fit the limit, and was not run like that."
    elif not judgement.as_claimed and not blame.lever:
        yield "No single lever could be blamed: each is right on its own and the plan stays wrong without any one of them."


def left_out(names: Sequence[str], rows: Sequence[PlannedLever], samples: int) -> Iterator[str]:
    """What has to be said where a lever of the plan could not be on."""
    if not names:
        return
    nothing = "The other levers were." if rows else "It is all the plan does, so nothing was proven."
    few = "a single sample cannot be divided, and two" if samples == 1 else f"{samples} samples are too few for it to divide, and more"
    yield (
        f"{', '.join(names)} was not compared, and nothing is claimed of it: {few} do not fit the limit. {nothing} Give a larger limit or "
        "budget, or write the plan (memfit plan -o) and verify it where there is more memory; in Python a smaller_batch (smaller volumes, "
        "shorter sequences) to compare on helps as well."
    )
