"""Where the plain step does not fit, a step with some of a plan's levers on may not either: it is run only where it is predicted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from memfit.errors import Infeasible
from memfit.fitting.plan_rows import captured
from memfit.levers import CannotApply, Lever
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.limit import Limit
from memfit.records import Ledger, PlannedLever
from memfit.step import Step
from memfit.units import format_bytes

MEMORY, FILE, NOWHERE = "memory", "file", ""  # where what autograd keeps has room


@dataclass(frozen=True)
class Room:
    """What there is of it; `plain` is the plain step's ledger, which is beyond the limit."""

    limit: Limit
    plain: Ledger
    copy: int  # bytes of a later step's batch, beside the first; 0: all steps run on one

    def place_of(self, step: Step, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> str:
        """Nowhere for what cannot be predicted: a lever that breaks a simulation may break anything. What is refused takes nothing."""
        try:
            return next((place for place in (MEMORY, FILE) if self._need(step, rows, levers, place) <= self.limit.bytes), NOWHERE)
        except CannotApply:
            return MEMORY
        except Exception:
            return NOWHERE

    def for_plan(self, step: Step, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> tuple[str, Room]:
        """The place of the whole plan, which may leave no room for a second batch; Infeasible where it was made for more than there is.

        A plan that cannot be predicted runs, and shows why.
        """
        tried = (self, replace(self, copy=0))
        if found := next(((place, room) for room in tried if (place := room.place_of(step, rows, levers))), None):
            return found
        try:
            needed = tried[1]._need(step, rows, levers, FILE)
        except Exception:
            return MEMORY, self
        raise Infeasible(
            f"The step with this plan cannot be run inside {format_bytes(self.limit.bytes)}{self.limit.whose}: it is predicted to "
            f"need {format_bytes(needed)}, with what autograd keeps in a file. Give a larger --limit, plan for less, or prove it "
            "where there is more memory.",
            needed,
            {},
        )

    def _need(self, step: Step, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], place: str) -> int:
        with kept_in_file(step) if place == FILE else nullcontext():
            return captured(step, rows, levers, self.plain).process_high_bytes + self.copy
