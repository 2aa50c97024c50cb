"""A lever that brings other operators is not only rewritten on paper: it is tried on simulated tensors, and its operators are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memfit.levers import Lever
from memfit.levers.lever import why_left_out
from memfit.levers.undo import Undo
from memfit.planner.combining import helps
from memfit.records import EXACTNESS, Ledger, Option
from memfit.step import Step

_BRING_OPERATORS = {"attention": "reordered", "outer_product": "reordered", "precision": "rounded"}  # and how exact they are at best


def with_captured(
    levers: Mapping[str, Lever],
    step: Step,
    plain: Ledger,
    seen: Callable[[Step], Ledger],
    allowed: str,
    progress: Callable[[str], None] = lambda words: None,
) -> dict[str, Lever]:
    """The levers, with a CapturedLever in place of each allowed one that brings operators which the plain step does not have."""
    names = {name for name, word in _BRING_OPERATORS.items() if EXACTNESS.index(word) <= EXACTNESS.index(allowed)}
    return {name: CapturedLever(lever, step, plain, seen, progress) if name in names else lever for name, lever in levers.items()}


class CapturedLever:
    """Looks like the lever; of its options only the first that applies and helps is offered, and its ledger is a captured one.

    A table of saved tensors that is made on that ledger names operators that are really there, and knows what they cost.
    """

    def __init__(
        self, lever: Lever, step: Step, plain: Ledger, seen: Callable[[Step], Ledger], progress: Callable[[str], None] = lambda words: None
    ) -> None:
        self._lever, self._step, self._plain, self._seen, self._progress = lever, step, plain, seen, progress
        self.name, self.exactness, self.needs, self.excludes = lever.name, lever.exactness, lever.needs, lever.excludes
        self._found: dict[str, Ledger | None] = {}  # None: the step does not take it
        self._ratios: dict[str, float] = {}  # of captured to weighed seconds

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """At most one."""
        for option in self._lever.options(ledger):
            if option.name not in self._found:
                self._found[option.name] = self._captured(option)
            found = self._found[option.name]
            if found is not None and helps(self._plain, found):
                return [option]
        return []

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """As captured for the plain step; on paper where another lever came first, with seconds in the measure of the captured ones."""
        found = self._found.get(option.name)
        if found is not None and ledger.trace is self._plain.trace:
            return found
        return _scaled(self._lever.rewrite(ledger, option), self._dearer(option))

    def apply(self, step: Step, option: Option) -> Undo:
        """The lever's own."""
        return self._lever.apply(step, option)

    def _captured(self, option: Option) -> Ledger | None:
        """None where it does not apply or the step fails with it on: the plain one was captured, so it is the lever."""
        try:
            with self._lever.apply(self._step, option):
                return self._seen(self._step)
        except Exception as error:
            self._progress(why_left_out([self.name], error))
            return None

    def _dearer(self, option: Option) -> float:
        """How many times what it is on paper; asked for only where another lever comes first, since weighing takes a while."""
        found = self._found.get(option.name)
        if option.name not in self._ratios:
            on_paper = None if found is None else self._lever.rewrite(self._plain, option).step_seconds
            self._ratios[option.name] = found.step_seconds / on_paper if found and found.step_seconds and on_paper else 1.0
        return self._ratios[option.name]


def _scaled(ledger: Ledger, times: float) -> Ledger:
    trace = ledger.trace
    assert trace is not None
    ops = tuple(op if op.seconds is None else replace(op, seconds=op.seconds * times) for op in trace.ops)
    seconds = None if trace.step_seconds is None else trace.step_seconds * times
    return replace(ledger, trace=replace(trace, ops=ops, step_seconds=seconds), step_seconds=seconds)
