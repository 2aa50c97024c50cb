"""Every error a user can meet. Each message says what is wrong, why, and the way out; `main` turns it into an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CannotSimulate",
    "Infeasible",
    "MemfitError",
    "NotEquivalent",
    "NotProven",
    "PlanError",
    "RecordError",
    "StepError",
    "TargetError",
]


class MemfitError(Exception):
    """The user's mistake, told in one message. Commands print it without a traceback and exit with `exit_code`."""

    exit_code = 2


class StepError(MemfitError):
    """A training step that cannot work as handed over; every fault found is told at once.

    >>> print(StepError(["the batch is empty: give it at least one sample"]))
    This step cannot be trained:
      - the batch is empty: give it at least one sample
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("This step cannot be trained:\n" + "\n".join(f"  - {fault}" for fault in self.faults))


class CannotSimulate(MemfitError):
    """The step asks for real values (`.item()`, a branch on a tensor), which a simulation does not have."""

    def __init__(self, operation: str, source: str) -> None:
        self.operation, self.source = operation, source
        super().__init__(
            f"This step cannot be simulated: {source} needs the values of a tensor ({operation}), and simulated tensors have none.\n"
            "memfit profile without --simulate (in Python: memfit.profile(step)) measures it as it is; plan, check and fit need a "
            "simulation: return the tensor and look at its value after the step."
        )


class TargetError(MemfitError):
    """TARGET does not lead to a function that returns a Step."""


class RecordError(MemfitError):
    """A saved record that cannot be read: not ours, damaged, or from a newer memfit."""


class PlanError(MemfitError):
    """A plan that does not belong to this step, or that this memfit cannot apply."""


class Infeasible(MemfitError):
    """The planner's honest no: the lowest that can be reached, what fills it, and what would help."""

    exit_code = 1
    plan: Any = None  # a records.Plan, where there was one and it could not be proven

    def __init__(self, message: str, lowest_bytes: int, reachable_bytes: dict[str, int]) -> None:
        self.lowest_bytes, self.reachable_bytes = lowest_bytes, reachable_bytes
        super().__init__(message)

    def __reduce__(self) -> tuple[type[Infeasible], tuple[Any, ...], dict[str, Any]]:
        """So that it comes back whole from another process."""
        return Infeasible, (str(self), self.lowest_bytes, self.reachable_bytes), vars(self)


class NotEquivalent(MemfitError):
    """The proof's honest no: the tensor, its error, the bound, and the lever to blame.

    >>> print(NotEquivalent("the gradient of encoder.weight", 0.5, 1e-6, "microbatch"))
    The fitted step is not the same training: the gradient of encoder.weight is off by 0.5, at most 1e-06 is allowed.
    The lever to blame is microbatch: plan without it.
    """

    exit_code = 1
    plan: Any = None  # the records.Plan that was refused, where `fit` refused it

    def __init__(self, what: str, error: float | None, bound: float | None, culprit: str, verdict: Any = None) -> None:
        self.what, self.error, self.bound, self.culprit = what, error, bound, culprit
        self.verdict = verdict  # the records.Verdict with all of it
        blame = f"The lever to blame is {culprit}: plan without it." if culprit else "No single lever could be blamed."
        off = "" if error is None or bound is None else f" is off by {error:.3g}, at most {bound:.3g} is allowed"
        super().__init__(f"The fitted step is not the same training: {what}{off}.\n{blame}")

    def __reduce__(self) -> tuple[type[NotEquivalent], tuple[Any, ...], dict[str, Any]]:
        """So that it comes back whole from another process."""
        return NotEquivalent, (self.what, self.error, self.bound, self.culprit), vars(self)


class NotProven(NotEquivalent):
    """The proof's other no: nothing was found wrong, and not every lever could be compared here.

    >>> print(NotProven("microbatch was not compared."))
    It could not be proven here that the fitted step is the same training: microbatch was not compared.
    """

    def __init__(self, what: str, verdict: Any = None) -> None:
        self.what, self.error, self.bound, self.culprit, self.verdict = what, None, None, "", verdict
        MemfitError.__init__(self, f"It could not be proven here that the fitted step is the same training: {what}")

    def __reduce__(self) -> tuple[type[NotProven], tuple[Any, ...], dict[str, Any]]:
        """So that it comes back whole from another process."""
        return NotProven, (self.what,), vars(self)
