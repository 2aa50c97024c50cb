"""`memfit.profile`: where every byte of a training step goes."""

from __future__ import annotations

from collections.abc import Callable

from memfit.capture import capture
from memfit.ledger import account
from memfit.records import Ledger
from memfit.step import Step


def _silent(words: str) -> None:
    """Progress that nobody asked to see."""


def profile(step: Step, *, simulate: bool = False, device: str | None = None, progress: Callable[[str], None] = _silent) -> Ledger:
    """Where every byte of a step goes: measured on a real run that is rolled back, or predicted without touching memory.

    >>> import torch
    >>> net = torch.nn.Linear(8, 8)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))
    >>> ledger = profile(step, simulate=True)
    >>> ledger.by_category["parameters"], sum(ledger.by_category.values()) == ledger.peak_bytes
    (288, True)
    """
    return account(capture(step, simulate, device, progress))
