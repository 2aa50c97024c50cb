"""Over random small networks: right plans pass, wrong ones are caught and the right lever is blamed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_random_networks import LAYERS, WIDTHS, random_step

from memfit import Step, verify
from memfit.records import Verdict
from small_levers import CHECKPOINT, FUSED, NOTHING, SPLIT, WRONG, SmallLever, plan_of

OFTEN = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
OPTIMIZERS = st.sampled_from(["sgd", "adamw"])
TRAINABLE = LAYERS.filter(lambda kinds: ("relu_", "relu_") not in pairwise(kinds))  # torch refuses two in a row
NOT_SEPARABLE = {"batch_norm", "dropout"}


def judged(step: Step, *levers: SmallLever) -> Verdict:
    return verify(step, plan_of(step, *levers), levers={lever.name: lever for lever in levers})


@OFTEN
@given(TRAINABLE, WIDTHS, st.sampled_from([1, 2, 5]), st.booleans(), OPTIMIZERS)
def test_right_plans_pass(kinds: list[str], width: int, batch: int, frozen: bool, optimizer: str) -> None:
    def make() -> Step:
        return random_step(kinds, width, batch, frozen, optimizer)

    exact = judged(make(), CHECKPOINT, NOTHING)
    assert exact.equivalent and exact.worst.error == 0.0, exact
    levers = (CHECKPOINT, FUSED) if NOT_SEPARABLE & set(kinds) else (CHECKPOINT, FUSED, SPLIT)
    rounded = judged(make(), *levers)
    assert rounded.equivalent and not rounded.notes, rounded


@OFTEN
@given(TRAINABLE, WIDTHS, st.sampled_from(["weakened", "detached", "unweighted", "lost part", "modified"]), OPTIMIZERS)
def test_wrong_plans_are_caught(kinds: list[str], width: int, name: str, optimizer: str) -> None:
    assume(not NOT_SEPARABLE & set(kinds))
    verdict = judged(random_step(kinds, width, 5, False, optimizer), NOTHING, WRONG[name], FUSED)
    assert not verdict.equivalent and verdict.culprit == name, verdict


@OFTEN
@given(TRAINABLE, WIDTHS, OPTIMIZERS)
def test_what_goes_wrong_a_step_later_is_caught(kinds: list[str], width: int, optimizer: str) -> None:
    verdict = judged(random_step(kinds, width, 5, False, optimizer), WRONG["stale"], FUSED)
    assert not verdict.equivalent and verdict.culprit == "stale", verdict
