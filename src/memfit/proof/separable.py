"""Whether a batch may be taken in parts: found by doing it, on a few samples, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.capture.rollback import rolled_back
from memfit.errors import MemfitError
from memfit.levers.microbatch import MicroBatch
from memfit.records import Option
from memfit.step import Step
from memfit.step.parts import sliced
from memfit.step.running import Guard, Running

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_FEW = 4

Gradients = dict[str, list[torch.Tensor]]


def why_not_separable(step: Step, option: Option, samples: int = _FEW) -> str:
    """Why micro-batches would not give the whole batch's gradients; "" when they do. `option` is one of microbatch's.

    The first few samples are run as one batch and one by one, under the same random numbers, and everything is put back.

    >>> net = torch.nn.Linear(4, 4)
    >>> step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 4))
    >>> why_not_separable(step, Option("microbatch", "", "reordered", {"size": 2, "batch": 4, "draws": {}, "again": False}))
    ''
    """
    if option.exactness != "reordered":
        return ""  # other random numbers give other gradients, whatever the loss
    count = min(samples, step.batch_size)
    places = step.running.places
    few = replace(step, batch=sliced(step.batch, step.batch_size, 0, count, places), running=Running(places=places))
    with rolled_back(few):
        whole = _gradients(few)
    with rolled_back(few):
        try:
            with MicroBatch().apply(few, replace(option, settings={**option.settings, "size": 1})):
                parts = _gradients(few)
        except MemfitError as error:
            return str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return f"the step fails on a single sample, where {count} together work ({why}). Leave out microbatch."
    return next((told for phase in whole if (told := _told(phase, whole[phase], parts[phase], count))), "")


class _Collector(Guard):
    """A guard that takes the gradients and lets no optimizer step."""

    def __init__(self, step: Step) -> None:
        self.found: Gradients = {}
        self._parameters = [p for model in step.models.values() for p in model.parameters() if p.requires_grad]

    def begins(self, phase: str, number: int, batch: Any, carry: dict[str, Any]) -> None:
        """Nothing to prepare."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is."""
        return loss

    def lets_step(self, phase: str, optimizers: Sequence[Optimizer]) -> bool:
        """Never."""
        self.found[phase] = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in self._parameters]
        return False


def _gradients(step: Step) -> Gradients:
    collector = _Collector(step)
    step.running.guard = collector
    try:
        step.run(step.batch, schedule=False)
    finally:
        step.running.guard = None
    return collector.found


def _told(phase: str, whole: list[torch.Tensor], parts: list[torch.Tensor], count: int) -> str:
    tolerance = max((_TOLERANCES.get(gradient.dtype, 1e-3) for gradient in whole), default=0.0)
    if _distance(whole, parts) <= tolerance:
        return ""
    which = f"the loss of phase {phase!r}" if phase else "the loss"
    start = f"{count} samples one by one do not give the gradients they give together (they differ by {_distance(whole, parts):.0%})"
    if _distance(whole, [gradient * count for gradient in parts]) <= tolerance:
        return f"{start}: {which} is a sum over the batch, not a mean. Divide it by the number of samples, or leave out microbatch."
    return (
        f"{start}: {which} compares samples with each other (a contrastive loss, statistics of the whole batch), or it is no mean over "
        "samples: then give what it is a mean over as Step.weight, as the number of tokens that count. Else leave out microbatch."
    )


def _distance(whole: list[torch.Tensor], parts: list[torch.Tensor]) -> float:
    """The largest error of a parameter's gradient, against its own norm or a hundredth of all of them."""
    overall = float(torch.stack([gradient.double().norm() for gradient in whole]).norm())
    if not overall:
        return 0.0 if all(not part.any() for part in parts) else 1.0
    errors = [
        float((a.double() - b.double()).norm()) / max(float(a.double().norm()), 0.01 * overall) for a, b in zip(whole, parts, strict=True)
    ]
    return max(errors)
