"""Errors come back whole from another process."""

from __future__ import annotations

import pickle

import pytest

from memfit.errors import Infeasible, MemfitError, NotEquivalent


@pytest.mark.parametrize("error", [Infeasible("It does not fit.", 7, {"bitwise": 9}), NotEquivalent("a gradient", 0.5, 1e-6, "saved")])
def test_pickled(error: MemfitError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
