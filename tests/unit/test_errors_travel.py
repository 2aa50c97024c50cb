"""Errors come back whole from another process."""

from __future__ import annotations

import pickle

import pytest

from memfit.errors import Infeasible, MemfitError, NotEquivalent, NotProven
from memfit.records import Plan, Verdict, Worst

VERDICT = Verdict(False, "bitwise", {}, Worst("a gradient", 0.5, 1e-6), {})
UNPROVEN = Infeasible("No room for the proof.", 7, {})
UNPROVEN.plan = Plan(True, 1, 1, 1, 1.0, "bitwise", ())


@pytest.mark.parametrize(
    "error",
    [
        Infeasible("It does not fit.", 7, {"bitwise": 9}),
        UNPROVEN,
        NotEquivalent("a gradient", 0.5, 1e-6, "saved", VERDICT),
        NotProven("microbatch", VERDICT),
    ],
)
def test_pickled(error: MemfitError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
