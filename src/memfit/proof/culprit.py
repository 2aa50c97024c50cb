"""Which lever of a plan is to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.levers import Lever
from memfit.proof.fitted import judge
from memfit.proof.reference import Reference
from memfit.proof.room import MEMORY
from memfit.records import PlannedLever


class Blame(NamedTuple):
    """The lever, or several, or none; and whether some sets of levers were not tried, for want of memory."""

    lever: str
    untried: bool = False


def blame_for(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever]) -> Blame:
    """The lever without which the plan is right; else those that are wrong on their own; nothing when it is none of them."""
    if len(rows) == 1:
        return Blame(rows[0].name)
    untried = False
    for number, lever in enumerate(rows):
        right = _is_right(reference, [*rows[:number], *rows[number + 1 :]], levers)
        if right:
            return Blame(lever.name)
        untried = untried or right is None
    alone = {lever.name: _is_right(reference, [lever], levers, otherwise=True) for lever in rows}
    wrong = [name for name, right in alone.items() if right is False]
    return Blame(" and ".join(wrong), untried or None in alone.values())


def _is_right(reference: Reference, rows: Sequence[PlannedLever], levers: Mapping[str, Lever], otherwise: bool = False) -> bool | None:
    """`otherwise` is the answer for levers that cannot act without the ones left out; None where there is no room to ask.

    Without the lever that makes a step small enough the others are hardly less than the plain step.
    """
    room = reference.sample.room
    place = MEMORY if room is None else room.place_of(reference.step, rows, levers)
    if not place:
        return None
    found = judge(reference, rows, levers, place)
    return otherwise if found.run.outcome.refused else found.as_claimed
