"""`memfit.plan`: the fastest set of techniques that makes a step fit a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from memfit.capture import capture
from memfit.capture.op_times import OpCalls
from memfit.capture.process import warmed_up_once
from memfit.capture.speeds import speeds_of, times_slower_in_half
from memfit.errors import Infeasible, MemfitError
from memfit.fitting.applying import apply_levers, option_of, refuse_fitted
from memfit.fitting.captured_lever import with_captured
from memfit.fitting.host_memory import host_room_of, put_on_host
from memfit.fitting.timed_ledgers import seen_with_times, variants_of, with_times
from memfit.growth import growth_facts
from memfit.ledger import account
from memfit.levers import LEVERS, CannotApply, Lever
from memfit.levers.architecture import ArchitectureLever
from memfit.levers.lever import why_left_out
from memfit.levers.saved import table_option
from memfit.levers.saved.words import words_of
from memfit.planner.combining import Rewriter
from memfit.planner.comparing import compared
from memfit.planner.costs import timed_share
from memfit.planner.explaining import alternatives, explained_levers, infeasible, without_half
from memfit.planner.learning import Learnt
from memfit.planner.proposing import Proposal, Proposals, Proposer
from memfit.planner.reaching import Reaching
from memfit.profiling import profile
from memfit.records import EXACTNESS, Ledger, Option, Plan, PlannedLever, loosest
from memfit.step import Step, device_of
from memfit.step.fingerprint import fingerprint
from memfit.units import parse_bytes

_NEARLY_ALL = 0.9  # of a step's seconds
_SEARCH_SECONDS = (2.5, 0.9, 0.5, 0.4, 0.3, 0.3)  # rounds of proposing, capturing and proposing again with what the capture taught
_LOWEST_SECONDS = 2.0
_HALF = ("bfloat16",)  # float16 takes as much, and on a processor that multiplies it number by number minutes to try
_EMULATED, _CHEAP = 3.0, 1.5  # times slower than float32, beyond which half precision is not weighed where something so cheap does it
_REACHABLE_SECONDS = 0.3  # for each class of exactness, once a plan is found
_MOST_OPS = 8000  # beyond, rewriting a step for looser classes takes seconds (12,500 took 3.8)
_COMPARING_SECONDS = 0.5  # with what was not chosen


@dataclass(frozen=True)
class Planned:
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


def plan(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> Plan:
    """The fastest plan whose process stays inside the budget, captured once more before it is shown; Infeasible where there is none.

    `host_budget` limits what the process and its workers take of the host's memory, where the device has memory of its own.

    >>> import torch
    >>> net = torch.nn.Linear(8, 8)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))
    >>> plan(step, "8GiB").levers  # a budget above the need changes nothing
    ()
    """
    return planned(step, budget, allow=allow, device=device, host_budget=host_budget, levers=levers, progress=progress).plan


def planned(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
    quick: bool = False,
    first: Ledger | None = None,
) -> Planned:
    """What `plan` finds, with the ledgers. `quick`: only whether there is a plan counts, so nothing is timed, and nothing explained.

    `first` is the plain step as this process predicted it before: the step has been run since.
    """
    refuse_fitted(step)
    request = Request(parse_bytes(budget), allow, device, host_budget, levers, quick, first)
    refuse_unknown_exactness(allow)
    return _found(step, request, progress)


def _found(step: Step, request: Request, progress: Callable[[str], None]) -> Planned:
    """Without half precision where that is dear here and something cheap does it; as it was asked for otherwise."""
    if request.half and _is_emulated(step, request.device):
        fewer = {name: lever for name, lever in request.levers.items() if name != "precision"}
        with suppress(Infeasible):
            found = _found(step, replace(request, levers=fewer), progress)
            if (found.plan.predicted_slowdown or 1.0) < _CHEAP:
                return replace(found, plan=without_half(found.plan, times_slower_in_half()))
    return _found_with_all(step, request, progress)


def _found_with_all(step: Step, request: Request, progress: Callable[[str], None]) -> Planned:
    calls, device, half = OpCalls(), request.device, request.half
    plain = account(capture(step, True, device, progress, calls, half))
    plain = plain if request.first is None else warmed_up_once(plain, request.first)
    host_room = host_room_of(plain, request.host_budget)
    if plain.process_high_bytes <= request.budget:
        return Planned(_empty(step, request, plain), plain, plain)
    costed = plain if request.quick else with_times(plain, calls, progress)

    def seen(changed: Step) -> Ledger:
        if request.quick:
            return account(capture(changed, True, device, progress, half=half))
        return seen_with_times(changed, device, half, progress)

    levers = with_captured(request.levers, step, costed, seen, request.allow, progress)
    if request.allow == "altered" and "architecture" in levers:
        levers = {**levers, "architecture": ArchitectureLever(variants_of(step, device, progress))}
    progress("weighing techniques")
    return _Planning(step, replace(request, levers=levers), plain, costed, host_room, progress).search()


def refuse_unknown_exactness(allow: str) -> None:
    """Raise where `allow` is no class."""
    if allow not in EXACTNESS:
        raise MemfitError(f"There is no exactness {allow!r}: allow one of {', '.join(EXACTNESS)}.")


def _is_emulated(step: Step, device: str | None) -> bool:
    """Whether half precision runs without instructions for it: then what its operators take inside is minutes to measure, for nothing."""
    return (device or device_of(step)) == "cpu" and times_slower_in_half() > _EMULATED


@dataclass
class _Planning:
    step: Step
    request: Request  # with levers that were captured on this step
    plain: Ledger
    timed: Ledger  # the same with what its ops cost
    host_room: float
    progress: Callable[[str], None]
    seen: list[int] = field(default_factory=list)  # captured processes, none of them inside the budget
    proposer: Proposer = field(init=False)
    learnt: Learnt = field(init=False)

    def __post_init__(self) -> None:
        self.proposer, self.learnt = self._proposer(self.request.levers, self.request.allow), Learnt(self.request.budget)

    def search(self) -> Planned:
        """Propose, apply to simulated tensors, capture: what does not fit then is never shown. In the end the lowest of all is tried."""
        for seconds in _SEARCH_SECONDS:
            proposals = self.proposer.propose(self.learnt, seconds)
            if not proposals.fitting:
                break
            if fitted := self._fitted(proposals.fitting[0]):
                return self._planned(fitted, proposals)
        while lowest := self.proposer.lowest(self.request.allow, _LOWEST_SECONDS):
            known = len(self.seen)
            if fitted := self._fitted(lowest):
                return self._planned(fitted, Proposals(proposals.plain_seconds, [lowest]))
            if len(self.seen) > known:
                break
        raise self._impossible()

    def _planned(self, fitted: Ledger, proposals: Proposals) -> Planned:
        plan = self._plan(fitted, proposals)
        return Planned(plan if self.request.quick else self._explained(plan, fitted, proposals), self.plain, fitted)

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
        self.seen.append(fitted.process_high_bytes)
        self.learnt.from_capture(winner, fitted)
        return None

    def _impossible(self) -> Infeasible:
        lowest = min(self.seen, default=self.plain.process_high_bytes)
        if self.request.quick:
            return infeasible(self.request.budget, lowest, self.plain, self.request.allow, {}, {}, None)
        variants = {name: ledger.process_high_bytes for name, ledger in variants_of(self.step, self.request.device, self.progress).items()}
        self.progress("weighing what looser classes would reach")
        reaching, split = self._reaching(), self.request.levers.get("microbatch")
        reachable = {word: max(size, lowest) for word, size in reaching.with_allowed(lowest, _REACHABLE_SECONDS).items()}  # as captured
        reachable |= reaching.with_looser(lowest, _LOWEST_SECONDS, captured=lowest)
        return infeasible(self.request.budget, lowest, self.plain, self.request.allow, reachable, variants, split)

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


def _empty(step: Step, request: Request, plain: Ledger) -> Plan:
    seconds = time.monotonic() - request.started
    return Plan(
        True,
        request.budget,
        plain.peak_bytes,
        plain.process_bytes,
        1.0,
        "bitwise",
        (),
        planning_seconds=seconds,
        step=fingerprint(step),
        device=plain.device,
        predicted_host_bytes=plain.process.host_bytes,
        not_weighed=dict.fromkeys(EXACTNESS, "the step fits as it is"),
        **growth_facts(plain, request.budget),
    )


def options_of(proposal: Proposal) -> tuple[Option, ...]:
    """The levers of a proposal, in order; its table of saved tensors is the last."""
    trace = proposal.combination.ledger.trace
    assert trace is not None
    ops = proposal.table.ops
    if not ops:
        return proposal.combination.options
    return (*proposal.combination.options, table_option(trace, ops, f"{len(ops)} results not kept", words_of(trace, ops)))


def captured(step: Step, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], plain: Ledger, device: str | None = None) -> Ledger:
    """The ledger of a step with a plan's levers on; what was measured as a whole needs no capture."""
    if is_measured_as_a_whole(rows):
        return rewritten_by(plain, rows, levers)
    with apply_levers(step, rows, levers):
        return warmed_up_once(profile(step, simulate=True, device=device), plain)


def is_measured_as_a_whole(rows: Sequence[PlannedLever]) -> bool:
    """Whether the peak with these levers was measured before they were planned: a compiler's can be known in no other way."""
    return any("measured_peak_bytes" in lever.settings for lever in rows)


def rewritten_by(ledger: Ledger, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> Ledger:
    """The ledger that a plan's levers make of a plain step's, one after the other."""
    for lever in rows:
        ledger = levers[lever.name].rewrite(ledger, option_of(lever))
    return ledger


def rows_of(options: Sequence[Option]) -> list[PlannedLever]:
    """Options as rows of a plan, before what each saves is known."""
    return [PlannedLever(o.lever, o.name, o.exactness, settings=o.settings, why=o.why) for o in options]
