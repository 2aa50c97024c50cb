"""Every table of saved tensors there is, where there are few: what is found then is the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from math import prod
from typing import Protocol

from memfit.levers.saved.table import BITS, RECOMPUTE, TIMES
from memfit.planner.candidates import Candidate
from memfit.planner.evaluation import Outcome

_FEW = 1000  # tables that differ in more than in how often a result is made


class Searching(Protocol):
    """What it needs of a search."""

    candidates: dict[int, Candidate]  # by op, whose results can be made again
    masks: dict[int, Candidate]  # that can be packed
    ways: list[str]

    def tried(self, ops: dict[int, str]) -> tuple[object, Outcome]:
        """What a table gives."""


def every_table(search: Searching) -> Iterator[Outcome]:
    """Each is tried when it is asked for: choices between keeping and making again first, then, if there are few, all others."""
    for chosen in product((None, RECOMPUTE), repeat=len(search.candidates)):
        yield search.tried(_decided(dict(zip(search.candidates, chosen, strict=True))))[1]
    ways = {op: _ways(search, op) for op in sorted({*search.candidates, *search.masks})}
    for chosen in product(*ways.values()) if prod(map(len, ways.values())) <= _FEW else ():
        ops = _decided(dict(zip(ways, chosen, strict=True)))
        outcome = search.tried(ops)[1]
        yield outcome
        yield from _other_counts(search, ops, outcome)


def _decided(ways: Mapping[int, str | None]) -> dict[int, str]:
    return {op: way for op, way in ways.items() if way}


def _ways(search: Searching, op: int) -> list[str | None]:
    ways = [way for way in search.ways if way not in TIMES] if op in search.candidates else []
    return [None, *ways, *([BITS] if op in search.masks else [])]


def _other_counts(search: Searching, ops: dict[int, str], outcome: Outcome) -> Iterator[Outcome]:
    """What stays from its n-th remaking on saves time only if it was made more often; if not, it is in memory for nothing."""
    counts = {op: [word for word, n in TIMES.items() if n < outcome.again.get(op, 0)] for op in ops if ops[op] == RECOMPUTE}
    for words in islice(product(*([RECOMPUTE, *fewer] for fewer in counts.values())), 1, None):
        yield search.tried({**ops, **dict(zip(counts, words, strict=True))})[1]
