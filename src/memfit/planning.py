"""`memfit.plan`: the fastest set of techniques that makes a step fit a budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.applying import apply_levers, option_of
from memfit.capture import capture
from memfit.capture.op_times import OpCalls, timed
from memfit.capture.part_times import part_costs
from memfit.capture.simulation import built_without_memory
from memfit.capture.speeds import speeds_here
from memfit.captured_lever import with_captured
from memfit.errors import MemfitError
from memfit.fingerprint import fingerprint
from memfit.ledger import account
from memfit.levers import LEVERS, CannotApply, Lever
from memfit.levers.architecture import ArchitectureLever
from memfit.levers.saved import table_option
from memfit.planner.costs import seconds_of, timed_share
from memfit.planner.explaining import alternatives, infeasible, planned_levers
from memfit.planner.proposing import Proposal, Proposals, Proposer, peak_inside
from memfit.profiling import profile
from memfit.records import EXACTNESS, Ledger, Option, Plan, PlannedLever, loosest
from memfit.step import Step
from memfit.units import parse_bytes

_A_LITTLE = 1 << 20
_NEARLY_ALL = 0.9  # of a step's seconds
_SEARCH_SECONDS = (4.0, 2.0, 2.0, 2.0)  # rounds of proposing, capturing and proposing again with what the capture taught


@dataclass(frozen=True)
class Planned:
    """A plan, and the ledgers it was made with: of the plain step and of the fitted one, both predicted."""

    plan: Plan
    plain: Ledger
    fitted: Ledger


def plan(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> Plan:
    """The fastest plan whose process stays inside the budget, captured once more before it is shown; Infeasible where there is none.

    >>> import torch
    >>> net = torch.nn.Linear(8, 8)
    >>> step = Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))
    >>> plan(step, "8GiB").levers  # a budget above the need changes nothing
    ()
    """
    return planned(step, budget, allow=allow, device=device, levers=levers, progress=progress).plan


def planned(
    step: Step,
    budget: str | int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
    explain: bool = True,
) -> Planned:
    """What `plan` finds, with the ledgers; an impossible budget is told what would help only if asked to `explain`."""
    started = time.monotonic()
    budget_bytes = parse_bytes(budget)
    if allow not in EXACTNESS:
        raise MemfitError(f"There is no exactness {allow!r}: allow one of {', '.join(EXACTNESS)}.")
    calls, half = OpCalls(), "precision" in levers and EXACTNESS.index(allow) >= EXACTNESS.index("rounded")
    plain = account(capture(step, True, device, progress, calls, half))
    if plain.process_high_bytes <= budget_bytes:
        return Planned(_empty(step, budget_bytes, plain, started), plain, plain)
    costed = with_times(plain, calls, progress)
    if EXACTNESS.index(allow) >= EXACTNESS.index("reordered"):
        levers = with_captured(levers, step, costed, lambda changed: seen_with_times(changed, device, half, progress))
    if allow == "altered" and "architecture" in levers:
        levers = {**levers, "architecture": ArchitectureLever(variants_of(step, device, progress))}
    progress("weighing techniques")
    return _Planning(step, budget_bytes, plain, costed, allow, device, levers, progress, started).planned(explain)


def variants_of(step: Step, device: str | None, progress: Callable[[str], None] = lambda words: None) -> dict[str, Ledger]:
    """The ledgers of the steps that the user would accept as well, each built without memory and simulated, with times."""
    found = {}
    for name, build in step.variants.items():
        progress(f"simulating the variant {name!r}")
        found[name] = seen_with_times(built_without_memory(build), device, progress=progress)
    return found


def seen_with_times(
    step: Step, device: str | None = None, half: bool = False, progress: Callable[[str], None] = lambda words: None
) -> Ledger:
    """A step simulated as it is now, with what its ops cost."""
    calls = OpCalls()
    return with_times(account(capture(step, True, device, progress, calls, half)), calls, progress)


def with_times(plain: Ledger, calls: OpCalls, progress: Callable[[str], None] = lambda words: None) -> Ledger:
    """A simulated step's ledger with the seconds its ops take on this machine; as it was for a device that is not here."""
    assert plain.trace is not None
    if not calls.by_op:
        return plain
    trace = timed(plain.trace, calls, seconds_of(plain.trace, speeds_here()).tolist(), progress)
    seconds, costs = float(seconds_of(trace, speeds_here()).sum()), part_costs(trace, calls, progress)
    return replace(plain, trace=replace(trace, step_seconds=seconds, part_costs=costs), step_seconds=seconds)


@dataclass
class _Planning:
    step: Step
    budget: int
    plain: Ledger
    timed: Ledger  # the same with what its ops cost
    allow: str
    device: str | None
    levers: Mapping[str, Lever]
    progress: Callable[[str], None]
    started: float

    def planned(self, explain: bool) -> Planned:
        """Propose, apply to simulated tensors, capture: what does not fit then is never shown."""
        proposer = Proposer(self.timed, self.levers, self.allow, speeds_here())
        refused, seen, most = set[str](), [], sys.maxsize
        for turn, seconds in enumerate((*_SEARCH_SECONDS, _SEARCH_SECONDS[-1])):
            last = turn == len(_SEARCH_SECONDS)  # then the lowest of all, whatever it costs
            proposals = proposer.propose(_nothing if last else peak_inside(self.budget, most), seconds)
            fitting = [p for p in proposals.fitting if _key(p) not in refused]
            found = fitting or [p for p in (proposals.lowest,) if p is not None and _key(p) not in refused]
            if not found:
                break
            winner, options = found[0], options_of(found[0])
            self.progress("capturing the plan with simulated tensors")
            fitted = self._captured(options)
            if fitted is None:
                refused.add(_key(winner))
            elif fitted.process_high_bytes <= self.budget:
                return Planned(self._plan(fitted, options, winner, proposals), self.plain, fitted)
            else:
                seen.append(fitted.process_high_bytes)
                if not fitting:  # it was the lowest already
                    break
                most = self._most_after(fitted, winner.peak_bytes)
        lowest = min(seen, default=self.plain.process_high_bytes)
        if not explain:
            raise infeasible(self.budget, lowest, self.plain, self.allow, {}, {}, None)
        variants = {name: ledger.process_high_bytes for name, ledger in variants_of(self.step, self.device, self.progress).items()}
        reachable, split = self._reachable(proposals, lowest), self.levers.get("microbatch")
        raise infeasible(self.budget, lowest, self.plain, self.allow, reachable, variants, split)

    def _most_after(self, fitted: Ledger, proposed: int) -> int:
        """The peak to aim at after a capture was too high: on the line through what the plain step takes and what this one does.

        Below what was proposed, too: where the capture came out higher than that, the same table would be proposed again.
        """
        lower = self.plain.peak_bytes - fitted.peak_bytes
        steepness = max(1.0, (self.plain.process_high_bytes - fitted.process_high_bytes) / lower) if lower > 0 else 1.0
        return min(fitted.peak_bytes, proposed) - int((fitted.process_high_bytes - self.budget) / steepness) - _A_LITTLE

    def _captured(self, options: tuple[Option, ...]) -> Ledger | None:
        """The fitted step's own ledger; None where a lever refuses this step. What was measured as a whole needs no capture."""
        if any("measured_peak_bytes" in option.settings for option in options):
            return rewritten_by(self.plain, rows_of(options), self.levers)
        try:
            with apply_levers(self.step, rows_of(options), self.levers):
                return profile(self.step, simulate=True, device=self.device)
        except CannotApply:
            return None

    def _reachable(self, proposals: Proposals, lowest: int | None = None) -> dict[str, int]:
        """The lowest under each class: as weighed, as captured for the allowed one, and weighed now for looser ones if nothing fits."""
        found = {c: size for c, size in proposals.reachable.items() if EXACTNESS.index(c) <= EXACTNESS.index(self.allow)}
        if lowest is None:
            return found
        self.progress("weighing what looser classes would reach")
        weighed = proposals.reachable.get(self.allow, lowest)
        for word in EXACTNESS[EXACTNESS.index(self.allow) + 1 :]:
            looser = Proposer(self.timed, self.levers, word, speeds_here()).propose(_nothing, _SEARCH_SECONDS[-1])
            found[word] = lowest - max(0, weighed - looser.reachable[word])  # a capture is only compared with a capture
        return found | {self.allow: lowest}

    def _plan(self, fitted: Ledger, options: tuple[Option, ...], winner: Proposal, proposals: Proposals) -> Plan:
        return Plan(
            feasible=True,
            budget_bytes=self.budget,
            predicted_peak_bytes=fitted.peak_bytes,
            predicted_process_bytes=fitted.process_bytes,
            predicted_slowdown=winner.seconds / proposals.plain_seconds,
            exactness=loosest([o.exactness for o in options]),
            levers=planned_levers(self.timed, options, self.levers, {"saved": winner.table.seconds * winner.combination.repeats}),
            alternatives=alternatives(winner, proposals),
            reachable_bytes=self._reachable(proposals),
            planning_seconds=time.monotonic() - self.started,
            step=fingerprint(self.step),
            times=self._times(),
        )

    def _times(self) -> str:
        assert self.timed.trace is not None
        share = timed_share(self.timed.trace, speeds_here())
        return "measured" if share > _NEARLY_ALL else "measured in part" if share else "estimated"


def _empty(step: Step, budget: int, plain: Ledger, started: float) -> Plan:
    seconds = time.monotonic() - started
    return Plan(True, budget, plain.peak_bytes, plain.process_bytes, 1.0, "bitwise", (), planning_seconds=seconds, step=fingerprint(step))


def _nothing(ledger: Ledger) -> int:
    """A limit that no step stays under: every combination is weighed."""
    return 0


def _key(proposal: Proposal) -> str:
    return repr(proposal.combination.options)


def options_of(proposal: Proposal) -> tuple[Option, ...]:
    """The levers of a proposal, in order; its table of saved tensors is the last."""
    trace = proposal.combination.ledger.trace
    assert trace is not None
    ops = proposal.table.ops
    if not ops:
        return proposal.combination.options
    why = "made again, packed or put away until backward needs them"
    return (*proposal.combination.options, table_option(trace, ops, f"{len(ops)} results not kept", why))


def is_measured_as_a_whole(plan: Plan) -> bool:
    """Whether a plan's peak was measured before it was planned: a compiler's can be known in no other way."""
    return any("measured_peak_bytes" in lever.settings for lever in plan.levers)


def rewritten_by(ledger: Ledger, planned: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> Ledger:
    """The ledger that a plan's levers make of a plain step's, one after the other."""
    for lever in planned:
        ledger = levers[lever.name].rewrite(ledger, option_of(lever))
    return ledger


def rows_of(options: Sequence[Option]) -> list[PlannedLever]:
    """Options as rows of a plan, before what each saves is known."""
    return [PlannedLever(o.lever, o.name, o.exactness, settings=o.settings, why=o.why) for o in options]
