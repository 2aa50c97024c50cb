"""Propose, put on simulated tensors, capture, until a plan fits; what it tells of itself, or that there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memfit.capture.speeds import speeds_of
from memfit.errors import Infeasible
from memfit.fitting.host_memory import put_on_host
from memfit.fitting.plan_rows import captured, options_of, rows_of
from memfit.fitting.timed_ledgers import variants_of
from memfit.growth import growth_facts
from memfit.levers import CannotApply, Lever
from memfit.levers.lever import why_left_out
from memfit.planner.combining import Rewriter
from memfit.planner.comparing import compared
from memfit.planner.costs import timed_share
from memfit.planner.explaining import alternatives, explained_levers
from memfit.planner.impossible import infeasible
from memfit.planner.learning import Learnt
from memfit.planner.proposing import Proposal, Proposals, Proposer
from memfit.planner.reaching import Reaching
from memfit.profiling import profile
from memfit.records import EXACTNESS, Ledger, Option, Plan, loosest
from memfit.step import Step
from memfit.step.fingerprint import fingerprint

_NEARLY_ALL = 0.9  # of a step's seconds
# Rounds of proposing, capturing and proposing again with what the capture taught: seconds, and the share of the limit that is asked for.
# Nearer and nearer to the lowest, so that the plan for a budget that is hard to meet is not at once the slowest there is.
_ROUNDS = ((2.3, 1.0), (0.7, 1.0), (0.4, 1.0), (0.3, 1.0), (0.25, 1.0), (0.25, 0.95), (0.2, 0.88), (0.2, 0.75))
_LOWEST_SECONDS = 2.0
_HALF = ("bfloat16",)  # float16 takes as much, and on a processor that multiplies it number by number minutes to try
_REACHABLE_SECONDS = 0.3  # for each class of exactness, once a plan is found
_MOST_OPS = 8000  # beyond, rewriting a step for looser classes takes seconds (12,500 took 3.8)
_COMPARING_SECONDS = 0.5  # with what was not chosen


@dataclass(frozen=True)
class FoundPlan:
    """A plan, and the ledgers it was made with: of the plain step and of the fitted one, both predicted."""

    plan: Plan
    plain: Ledger
    fitted: Ledger


@dataclass(frozen=True)
class Request:
    """What is asked of a plan, handed along as it is."""

    budget: int
    allow: str
    device: str | None
    host_budget: str | int | None
    levers: Mapping[str, Lever]
    quick: bool
    first: Ledger | None
    started: float = field(default_factory=time.monotonic)

    @property
    def half(self) -> Sequence[str]:
        """The dtypes in which operators are measured as well, where a plan may round."""
        return _HALF if "precision" in self.levers and EXACTNESS.index(self.allow) >= EXACTNESS.index("rounded") else ()


@dataclass
class PlanSearch:
    """For one step and request."""

    step: Step
    request: Request  # with levers that were captured on this step
    plain: Ledger
    timed: Ledger  # the same with what its ops cost
    host_room: float
    progress: Callable[[str], None]
    seen: list[Ledger] = field(default_factory=list)  # captured with proposals, none of them inside the budget
    proposer: Proposer = field(init=False)
    learnt: Learnt = field(init=False)

    def __post_init__(self) -> None:
        self.proposer, self.learnt = self._proposer(self.request.levers, self.request.allow), Learnt(self.request.budget)

    def search(self) -> FoundPlan:
        """Propose, apply to simulated tensors, capture: what does not fit then is never shown. In the end the lowest of all is tried."""
        for seconds, share in _ROUNDS:
            proposals = self.proposer.propose(self.learnt.lowered(share), seconds)
            if not proposals.fitting:
                break
            if fitted := self._fitted(proposals.fitting[0]):
                return self._found_plan(fitted, proposals)
        while lowest := self.proposer.lowest(self.request.allow, _LOWEST_SECONDS):
            known = len(self.seen)
            if fitted := self._fitted(lowest):
                return self._found_plan(fitted, Proposals(proposals.plain_seconds, [lowest]))
            if len(self.seen) > known:
                break
        raise self._impossible()

    def _found_plan(self, fitted: Ledger, proposals: Proposals) -> FoundPlan:
        plan = self._plan(fitted, proposals)
        return FoundPlan(plan if self.request.quick else self._explained(plan, fitted, proposals), self.plain, fitted)

    def _proposer(self, levers: Mapping[str, Rewriter], allowed: str) -> Proposer:
        return Proposer(self.timed, levers, allowed, speeds_of(self.plain.device), self.host_room)

    def _fitted(self, winner: Proposal) -> Ledger | None:
        """The proposal's own ledger if it is inside the budget; if not, what it shows is remembered."""
        self.progress("capturing the plan with simulated tensors")
        options = options_of(winner)
        try:
            fitted = self._captured(options)
        except Exception as error:
            self._refuse(winner, options, error)
            return None
        if fitted.process_high_bytes <= self.request.budget:
            return fitted
        self.seen.append(fitted)
        self.learnt.from_capture(winner, fitted)
        return None

    def _impossible(self) -> Infeasible:
        best = min(self.seen, key=lambda ledger: ledger.process_high_bytes, default=self.plain)
        if self.request.quick:
            return infeasible(self.request.budget, best, self.plain, self.request.allow, {}, {}, None)
        variants = {name: ledger.process_high_bytes for name, ledger in variants_of(self.step, self._seen, self.progress).items()}
        self.progress("weighing what looser classes would reach")
        lowest, reaching, split = best.process_high_bytes, self._reaching(), self.request.levers.get("microbatch")
        reachable = {word: max(size, lowest) for word, size in reaching.with_allowed(lowest, _REACHABLE_SECONDS).items()}  # as captured
        reachable |= reaching.with_looser(lowest, _LOWEST_SECONDS, captured=lowest)
        return infeasible(self.request.budget, best, self.plain, self.request.allow, reachable, variants, split)

    def _seen(self, other: Step) -> Ledger:
        return profile(other, simulate=True, device=self.request.device, progress=self.progress)

    def _captured(self, options: Sequence[Option]) -> Ledger:
        """The fitted step's own ledger."""
        return captured(self.step, rows_of(options), self.request.levers, self.plain, self.request.device)

    def _refuse(self, winner: Proposal, options: Sequence[Option], error: Exception) -> None:
        """The plain step was captured, so it is the levers: these together, or micro-batches in any company."""
        if not options:
            raise error
        if self._parts_fail(options, error):
            said = str(error).partition("\n")[0]
            self.progress(f"leaving out micro-batches: the loss does not take a part of the batch ({type(error).__name__}: {said})")
            self.proposer.refuse_lever("microbatch")
        else:
            self.progress(why_left_out([option.lever for option in options], error))
            self.proposer.refuse(winner.combination)

    def _parts_fail(self, options: Sequence[Option], error: Exception) -> bool:
        """Whether the loss, which ran on the whole batch, fails on a part of it, whatever else is on."""
        split = [option for option in options if option.lever == "microbatch"]
        if not split or isinstance(error, CannotApply):
            return False
        if len(options) == 1:
            return True
        try:
            self._captured(split)
        except Exception:
            return True
        return False

    def _plan(self, fitted: Ledger, proposals: Proposals) -> Plan:
        winner = proposals.fitting[0]
        options = options_of(winner)
        return Plan(
            feasible=True,
            budget_bytes=self.request.budget,
            predicted_peak_bytes=fitted.peak_bytes,
            predicted_process_bytes=fitted.process_bytes,
            predicted_slowdown=winner.seconds / proposals.plain_seconds,
            exactness=loosest([o.exactness for o in options]),
            levers=tuple(rows_of(options)),
            planning_seconds=time.monotonic() - self.request.started,
            step=fingerprint(self.step),
            device=self.plain.device,
            predicted_host_bytes=self.plain.process.host_bytes + put_on_host(winner),
            times=self._times(),
            **growth_facts(fitted, self.request.budget),
        )

    def _explained(self, plan: Plan, fitted: Ledger, proposals: Proposals) -> Plan:
        """With what each lever does, what lost and why, how far from the best it may be, and what could be reached."""
        winner, levers = proposals.fitting[0], self.request.levers
        others = compared(self.proposer, winner, proposals.fitting, self.learnt, _COMPARING_SECONDS)
        reachable, not_weighed = self._reachable(fitted.process_high_bytes)
        return replace(
            plan,
            levers=explained_levers(self.timed, options_of(winner), levers, self.proposer.costs_of(winner)),
            alternatives=alternatives(self.timed, winner, proposals, others.unchosen),
            gap=others.gap,
            reachable_bytes=reachable,
            not_weighed=not_weighed,
            estimated=tuple(w for w in EXACTNESS[EXACTNESS.index(self.request.allow) + 1 :] if w not in not_weighed),
            planning_seconds=time.monotonic() - self.request.started,
        )

    def _reachable(self, captured: int) -> tuple[dict[str, int | None], dict[str, str]]:
        """The lowest under every class, and why a class has none: other models are only simulated for those who would take them."""
        self.progress("weighing what could be reached")
        reaching = self._reaching()
        reachable: dict[str, int | None] = {**reaching.with_allowed(captured, _REACHABLE_SECONDS)}
        if self.timed.trace is not None and len(self.timed.trace.ops) > _MOST_OPS:
            return reachable, dict.fromkeys(EXACTNESS[len(reachable) :], "it takes long with so many operators: allow it")
        reachable |= reaching.with_looser(reachable[self.request.allow] or captured, _REACHABLE_SECONDS)
        if self.step.variants and self.request.allow != "altered":
            return reachable | {"altered": None}, {"altered": "this step's variants are simulated only where altered is allowed"}
        return reachable, {}

    def _reaching(self) -> Reaching:
        return Reaching(self.timed, self.request.levers, self.request.allow, self.proposer, self._proposer)

    def _times(self) -> str:
        assert self.timed.trace is not None
        share = timed_share(self.timed.trace, speeds_of(self.plain.device))
        return "measured" if share > _NEARLY_ALL else "measured in part" if share else "estimated"
