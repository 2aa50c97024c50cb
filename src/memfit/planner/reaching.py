"""The lowest process that each class of exactness reaches, at its upper end, as weighed and not captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfit.planner.combining import Rewriter, is_allowed
from memfit.planner.proposing import Proposal, Proposer
from memfit.records import EXACTNESS, Ledger


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

        `captured` is what a capture of the lowest allowed gave: looser ones are then taken to be as far off what is weighed.
        """
        here, found = self.proposer.lowest(self.allowed, seconds), {self.allowed: reached}
        brought: set[str] = set()
        for word in EXACTNESS[EXACTNESS.index(self.allowed) + 1 :]:
            brings = self._brought_by(word)
            there = self._lowest(word, brings, here, seconds) if here and brings - brought else None
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

    def _lowest(self, word: str, brings: set[str], here: Proposal, seconds: float) -> Proposal | None:
        """With these levers and those of the lowest that is allowed: few combinations, which take no time to enumerate.

        Half precision is weighed on paper, its workspaces estimated: nothing is captured or timed that the plan had no need of.
        """
        company = {name: lever for name, lever in self.levers.items() if name in brings | here.combination.words | {"saved"}}
        return self.proposer_of(company, word).lowest(word, seconds)
