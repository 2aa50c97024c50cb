"""A training that has come to nothing ends with a message and exit code 1, before it is saved over what was good."""

from __future__ import annotations

import math

import memfit


class NothingLearnt(memfit.MemfitError):
    """A loss that is no number, or an epoch without a single step."""

    exit_code = 1


class Finite:
    """Looks at each epoch's end. A guard under mixed precision skips steps that are not finite and warns; if it skips all, nothing is left.

    >>> import torch
    >>> net = torch.nn.Linear(1, 1)
    >>> step = memfit.Step(net, lambda m, b: m(b).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 1))
    >>> Finite(step).check("epoch 2", float("nan"), steps=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    recipes.kit.finite.NothingLearnt: The loss of epoch 2 is nan: ...
    """

    def __init__(self, step: memfit.Step) -> None:
        self._step, self._skipped = step, _skipped(step)

    def check(self, epoch: str, loss: float, steps: int) -> None:
        """NothingLearnt, or nothing. A loss scale (float16) may skip the first steps until it suits, and that is as it should be."""
        before, self._skipped = self._skipped, _skipped(self._step)
        skipped = self._skipped - before
        if not math.isfinite(loss) and not skipped:
            raise NothingLearnt(
                f"The loss of {epoch} is {loss}: what it was trained to is not saved. Take a lower --lr, then --resume goes on after the "
                "epoch before, if there is one."
            )
        guard = self._step.running.guard
        if guard is not None and skipped >= steps * len(self._step.all_phases) and not guard.state_dict()["scales"]:
            raise NothingLearnt(
                f"Not one of the {steps} steps of {epoch} could be taken: each had a NaN or an infinity, and the warnings say where it "
                "began. Nothing is saved. Train in full precision."
            )


def _skipped(step: memfit.Step) -> int:
    guard = step.running.guard
    return 0 if guard is None else int(guard.state_dict()["skipped"])
