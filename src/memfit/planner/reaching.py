"""The lowest process that each class of exactness reaches, at its upper end, as weighed and not captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.ledger import account
from memfit.planner.combining import Rewriter, is_allowed
from memfit.planner.proposing import Proposal, Proposer
from memfit.records import EXACTNESS, Ledger, Option, Trace


@dataclass(frozen=True)
class Reaching:
    """For one step, and the class that is allowed."""

    plain: Ledger
    levers: Mapping[str, Rewriter]
    allowed: str
    proposer: Proposer
    proposer_of: Callable[[Mapping[str, Rewriter], str], Proposer]  # of fewer levers, under another class

    def with_allowed(self, captured: int, seconds: float) -> dict[str, int]:
        """Under each class up to the allowed one, and under that nothing above what was captured."""
        found: dict[str, int] = {}
        for word in EXACTNESS[: EXACTNESS.index(self.allowed) + 1]:
            lowest = self.proposer.lowest(word, seconds)
            found[word] = min([*found.values(), *([lowest.process_high_bytes] if lowest else [])], default=captured)
        return found | {self.allowed: min(found[self.allowed], captured)}

    def with_looser(self, reached: int, seconds: float, captured: int | None = None) -> dict[str, int]:
        """Under each looser class, never above what is `reached` without; variants, which are other models, are not among it.

        `captured` is what a capture of the lowest allowed gave: looser ones are then taken to be as far off what is weighed, and at
        their upper end. Without, they are estimates: what half precision takes inside is guessed, and the guess is taken at its word.
        """
        here, found = self.proposer.lowest(self.allowed, seconds), {self.allowed: reached}
        brought: set[str] = set()
        for word in EXACTNESS[EXACTNESS.index(self.allowed) + 1 :]:
            brings = self._brought_by(word)
            levers = self._company(brings, here, guessed=captured is None) if here and brings - brought else {}
            there = self.proposer_of(levers, word).lowest(word, seconds) if levers else None
            off = captured - here.process_high_bytes if here and captured else 0
            found[word] = min([*found.values(), *([there.process_high_bytes + off] if there else [])])
            brought |= brings
        return {word: size for word, size in found.items() if word != self.allowed}

    def _brought_by(self, word: str) -> set[str]:
        """Levers with an option that this class allows, and the allowed one does not."""
        return {
            name
            for name, lever in self.levers.items()
            if name != "architecture" and any(is_allowed(o, word) and not is_allowed(o, self.allowed) for o in lever.options(self.plain))
        }

    def _company(self, brings: set[str], here: Proposal, guessed: bool) -> dict[str, Rewriter]:
        """These levers and those of the lowest that is allowed: few combinations, quickly enumerated; nothing is captured or timed."""
        together = {name: lever for name, lever in self.levers.items() if name in brings | here.combination.words | {"saved"}}
        return together | {name: _AtItsWord(self.levers[name]) for name in brings if guessed}


class _AtItsWord:
    """A lever whose guesses at what operators take inside count as if they were measured."""

    def __init__(self, lever: Rewriter) -> None:
        self._lever, self.excludes = lever, lever.excludes

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """The lever's own."""
        return self._lever.options(ledger)

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """Without the errors that the lever adds."""
        after = self._lever.rewrite(ledger, option)
        if ledger.trace is None or after.trace is None or _unsure(after.trace) <= _unsure(ledger.trace):
            return after
        return account(replace(after.trace, ops=tuple(replace(op, workspace_error=0) for op in after.trace.ops)), causes=False)


def _unsure(trace: Trace) -> int:
    return sum(op.workspace_error for op in trace.ops)
