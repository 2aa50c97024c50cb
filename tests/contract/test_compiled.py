"""compile, whose peak nobody can foretell: its class and its undo. What a plan makes of it is in tests/unit/test_compiling.py."""

from __future__ import annotations

import pytest

from contract_zoo import is_as_before, judged, ledger, reference, step_of
from lever_law import furniture
from memfit.levers.compile import CompileLever, compiler_found


@pytest.mark.skipif(not compiler_found("cpu"), reason="no C++ compiler here: torch.compile cannot be tried")
def test_the_class_is_what_it_says_and_undo_restores() -> None:
    option = CompileLever().candidates(ledger("dense"))[0]
    before = furniture(reference("dense").step)
    found = judged("dense", [option])
    assert found.same and not found.run.outcome.failure and found.exactness == "reordered"
    assert furniture(reference("dense").step) == before
    step = step_of("dense")
    before = furniture(step)
    with CompileLever().apply(step, option):
        assert furniture(step) != before
    assert is_as_before("dense", step, before)
