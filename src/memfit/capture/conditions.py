"""What figures of a step hold for, beside the step itself: another torch, processor or batch moves the peak by some per cent."""

from __future__ import annotations

import torch

from memfit.capture.workspaces.remembered import machine_facts
from memfit.step import Batch
from memfit.step.batches import tensor_facts


def conditions_of(batch: Batch, device: str) -> dict[str, str]:
    """By a word each: torch's version, the machine's facts where operators were measured on it, and the batch's tensors."""
    machine = machine_facts() if device == "cpu" else {}
    return {"torch": torch.__version__.partition("+")[0], **machine, **tensor_facts(batch)}
