"""Which levers go together: every allowed combination of those that change the step as a whole, each rewritten into a ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from memfit.records import EXACTNESS, Ledger, Option

ORDER = ("architecture", "attention", "outer_product", "precision", "loader", "allocator", "optimizer", "chunk", "microbatch", "compile")
_FEW = {"allocator": 2, "attention": 2, "outer_product": 1, "precision": 1}  # options weighed of each
_MOST = 60  # combinations: beyond, later ones are as good as never the fastest


class Rewriter(Protocol):
    """The pure side of a lever."""

    @property
    def excludes(self) -> frozenset[str]:
        """Words of levers it cannot join."""

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """What it could do."""

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """What that would give."""


@dataclass(frozen=True)
class Combination:
    """Options in the order they are applied, and the ledger after them: that of a micro-batch is made when it is first asked for."""

    options: tuple[Option, ...]
    whole: Ledger  # after all options but that of micro-batches
    repeats: int = 1  # how often the ledger's line runs in a step: micro-batches
    beside: float = 0.0  # seconds that levers add to a step without adding to any op of it
    divide: Callable[[Ledger, Option], Ledger] | None = None
    waits: bool = False  # for samples that were made ahead before: nobody knows how long

    @cached_property
    def ledger(self) -> Ledger:
        """After all options."""
        return self.whole if self.divide is None else self.divide(self.whole, self.options[-1])

    @property
    def words(self) -> frozenset[str]:
        """The levers in it."""
        return frozenset(option.lever for option in self.options)

    @property
    def slowdown(self) -> float | None:
        """Of a combination that was measured as a whole: its time beside the plain step's. No table joins it."""
        return next((o.settings["measured_slowdown"] for o in self.options if "measured_slowdown" in o.settings), None)


def combinations(ledger: Ledger, levers: Mapping[str, Rewriter], allowed: str) -> Iterator[Combination]:
    """The plain step first; then with one lever, two, …, each of ORDER at most once."""
    found = [Combination((), ledger)]
    for word in (word for word in ORDER if word in levers):
        options = [o for o in levers[word].options(ledger) if is_allowed(o, allowed)][: _FEW.get(word)]
        options = _strongest(ledger, levers[word], options) if word == "loader" else options
        found += [joined for combination in found[:_MOST] for joined in _joined(combination, word, levers[word], options)]
    yield from found[: 4 * _MOST]


def milder(ledger: Ledger, levers: Mapping[str, Rewriter], combination: Combination) -> Iterator[Combination]:
    """The same levers with each milder option of the loader, the mildest first: every op stays as it is, so what fits is not slower."""
    for place, chosen in enumerate(combination.options):
        if chosen.lever == "loader":
            for option in levers["loader"].options(ledger):
                if option.name == chosen.name:
                    return
                if EXACTNESS.index(option.exactness) <= EXACTNESS.index(chosen.exactness):
                    yield from _of(ledger, levers, (*combination.options[:place], option, *combination.options[place + 1 :]))


def _of(ledger: Ledger, levers: Mapping[str, Rewriter], options: Sequence[Option]) -> Iterator[Combination]:
    """The one of these options, if each of them helps."""
    found = [Combination((), ledger)]
    for option in options:
        found = [joined for combination in found for joined in _joined(combination, option.lever, levers[option.lever], [option])]
    yield from found


def _strongest(ledger: Ledger, lever: Rewriter, options: Sequence[Option]) -> list[Option]:
    """Of what leaves every op as it is, what takes off most; where the step would wait and where random numbers differ, weighed apart."""
    found: dict[tuple[str, bool], tuple[int, Option]] = {}
    for option in options:
        after = lever.rewrite(ledger, option)
        kind, size = (option.exactness, _waits(ledger, after)), after.process_high_bytes
        if kind not in found or size < found[kind][0]:
            found[kind] = size, option
    return [option for _, option in found.values()]


def _waits(before: Ledger, after: Ledger) -> bool:
    """Whether samples are no longer made beside the step, or no longer kept."""
    workers, kept = (before.process.workers, after.process.workers), (before.process.cached_bytes, after.process.cached_bytes)
    return workers[0] > 0 == workers[1] or kept[0] > 0 == kept[1]


def _joined(combination: Combination, word: str, lever: Rewriter, options: Sequence[Option]) -> Iterator[Combination]:
    present = {option.lever for option in combination.options}
    if word == "microbatch" and "chunk" in present:
        return  # what a chunk has made small would be divided once more, on paper; chunks of a micro-batch are not weighed yet
    forbidden = {w for option in combination.options for w in option.settings.get("excludes", ())}
    if word in forbidden:
        return
    for option in options:
        if present & {*lever.excludes, *option.settings.get("excludes", ())}:
            continue
        joined = (*combination.options, option)
        if word == "microbatch":
            repeats = -(-combination.whole.batch_size // option.settings["size"])
            yield Combination(joined, combination.whole, repeats, combination.beside, lever.rewrite, combination.waits)
            continue
        after = lever.rewrite(combination.whole, option)
        if helps(combination.whole, after):
            waits = combination.waits or (word == "loader" and _waits(combination.whole, after))
            yield Combination(joined, after, 1, combination.beside + _beside_ops(combination.whole, after), waits=waits)


def _beside_ops(before: Ledger, after: Ledger) -> float:
    """What a lever that leaves every op as it is adds to a step: memory given back has to be asked for again."""
    if before.trace is None or after.trace is None or before.trace.ops is not after.trace.ops:
        return 0.0
    return (after.step_seconds or 0.0) - (before.step_seconds or 0.0)


def is_allowed(option: Option, allowed: str) -> bool:
    """Whether an option is as exact as was asked for; other random numbers are never a step on the way to something looser."""
    if option.exactness == "redrawn" and allowed != "redrawn":
        return False
    return EXACTNESS.index(option.exactness) <= EXACTNESS.index(allowed)


def helps(before: Ledger, after: Ledger) -> bool:
    """Whether the process needs less, if only at its worst."""
    return after.process_high_bytes < before.process_high_bytes or after.peak_bytes < before.peak_bytes
