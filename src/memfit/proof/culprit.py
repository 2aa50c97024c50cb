"""Which lever of a plan is to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.levers import Lever
from memfit.proof.fitted import judge
from memfit.proof.reference import Reference
from memfit.records import PlannedLever


def culprit_of(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> str:
    """The lever without which the plan is right; else those that are wrong on their own; nothing when it is none of them."""
    if len(rows) == 1:
        return rows[0].name
    for number, lever in enumerate(rows):
        if _is_right(reference, [*rows[:number], *rows[number + 1 :]], levers):
            return lever.name
    return " and ".join(lever.name for lever in rows if not _is_right(reference, [lever], levers, otherwise=True))


def _is_right(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], otherwise: bool = False) -> bool:
    """`otherwise` is the answer for levers that cannot act without the ones left out."""
    found = judge(reference, rows, levers)
    return otherwise if found.run.outcome.refused else found.as_claimed
