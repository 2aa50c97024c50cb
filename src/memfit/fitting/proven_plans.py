"""Plans and proofs in turn, until a plan passes: a lever that fails here is left out of the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.errors import Infeasible, NotEquivalent
from memfit.fitting.given_plan import given
from memfit.fitting.plan_search import FoundPlan
from memfit.fitting.planning import find_plan
from memfit.levers import Lever
from memfit.proof import prove, require
from memfit.proof.limit import Limit, limit_of_machine, lower
from memfit.records import Ledger, Plan, Verdict
from memfit.step import Batch, Step
from memfit.units import parse_bytes

_STEPS = 3  # of the proof


@dataclass
class ProvenPlans:
    """For one step and budget; a plan that was given is the only one."""

    step: Step
    budget: str | int
    plan: Plan | None
    options: dict[str, Any]  # of the planner
    smaller_batch: Batch
    levers: Mapping[str, Lever]
    progress: Callable[[str], None]
    refused: dict[str, str] = field(default_factory=dict)  # levers, and how each failed
    first: Ledger | None = None  # the plain step, as it was first predicted

    def next(self) -> tuple[FoundPlan, Verdict]:
        """A plan and its verdict, which tells of the levers that failed; NotEquivalent where none of those that are left is to blame."""
        while True:
            found = self._found_plan()
            verdict = self._verdict(found)
            if verdict.equivalent or verdict.by_design:
                return found, replace(verdict, notes=(*dict.fromkeys(self.refused.values()), *verdict.notes))
            blamed = [name for name in self._offered() if name in verdict.culprit.split(" and ")]
            if self.plan is not None or not blamed:
                with _naming(found.plan):
                    require(verdict)
            told = _told(blamed, verdict)
            self.refused |= dict.fromkeys(blamed, told)
            self.progress(told)

    def _verdict(self, found: FoundPlan) -> Verdict:
        self.progress("verifying the plan")
        limit = lower(Limit(parse_bytes(self.budget)), limit_of_machine(self.step))
        with _naming(found.plan):
            return prove(self.step, found.plan, found.plain, _STEPS, limit, self.smaller_batch, self.levers, self.progress)

    def _offered(self) -> dict[str, Lever]:
        return {name: lever for name, lever in self.levers.items() if name not in self.refused}

    def _found_plan(self) -> FoundPlan:
        more: dict[str, Any] = {"levers": self._offered(), "progress": self.progress, "first": self.first, **self.options}
        try:
            found = find_plan(self.step, self.budget, **more) if self.plan is None else given(self.plan, self.step, self.budget, **more)
        except Infeasible as no:
            if not self.refused:
                raise
            told = "\n".join((str(no), *dict.fromkeys(self.refused.values())))
            raise Infeasible(told, no.lowest_bytes, no.reachable_bytes) from no
        self.first = self.first or found.plain
        return found


@contextmanager
def _naming(plan: Plan) -> Iterator[None]:
    """A no of the proof tells which plan it is about."""
    try:
        yield
    except (Infeasible, NotEquivalent) as no:
        no.plan = plan
        raise


def _told(blamed: Sequence[str], verdict: Verdict) -> str:
    no = NotEquivalent(verdict.worst.what, verdict.worst.error, verdict.worst.bound, verdict.culprit)
    why = f" {verdict.culprit_because}" if verdict.culprit_because else ""
    return f"Planned without {' and '.join(blamed)}, which failed the proof. {str(no).splitlines()[0]}{why}"
