"""Every way a lever goes wrong is caught, and the right lever is blamed, among others that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from memfit import NotEquivalent, Step, verify
from memfit.errors import PlanError
from memfit.levers import CannotApply, Undo
from memfit.proof import require
from memfit.records import Verdict
from memfit.step.running import Running
from small_levers import CHECKPOINT, FUSED, NOTHING, SPLIT, WRONG, SmallLever, plan_of
from small_steps import convolutional_2d, transformer


def ragged() -> Step:
    """Five samples: pieces of two leave one over."""
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(5, 16))


def quiet_transformer() -> Step:
    return transformer(dropout=0.0)


CASES: list[tuple[str, Callable[[], Step], str]] = [
    ("other masks", transformer, "the gradient of"),
    ("counted twice", convolutional_2d, "buffer 1.num_batches_tracked"),
    ("averaged twice", convolutional_2d, "buffer 1.running_mean"),
    ("unweighted", ragged, "the gradient of"),
    ("lost part", ragged, "the gradient of"),
    ("lost part", quiet_transformer, "the gradient of"),
    ("clipped parts", ragged, "the gradient of"),
    ("clipped parts", quiet_transformer, "the gradient of"),
    ("stale", ragged, "a step later"),
    ("stale", quiet_transformer, "a step later"),
    ("modified", ragged, "the gradient of"),
    ("modified", quiet_transformer, "the gradient of"),
    ("detached", ragged, "(missing)"),
    ("detached", quiet_transformer, "(missing)"),
    ("weakened", ragged, "the gradient of 0.weight"),
    ("weakened", quiet_transformer, "the gradient of 0.weight"),
    ("slower", ragged, "after the step"),
    ("slower", quiet_transformer, "after the step"),
]


def judged(step: Step, *levers: SmallLever) -> Verdict:
    return verify(step, plan_of(step, *levers), levers={lever.name: lever for lever in levers})


@pytest.mark.parametrize(("name", "make", "what"), CASES, ids=[f"{case[0]}-{case[1].__name__}" for case in CASES])
def test_it_is_caught_beside_levers_of_the_strictest_class(name: str, make: Callable[[], Step], what: str) -> None:
    verdict = judged(make(), NOTHING, WRONG[name], CHECKPOINT)
    assert not verdict.equivalent and verdict.culprit == name
    assert what in verdict.worst.what
    assert verdict.worst.error is not None and verdict.worst.bound is not None and verdict.worst.error > 100 * verdict.worst.bound


@pytest.mark.parametrize(("name", "make", "what"), CASES, ids=[f"{case[0]}-{case[1].__name__}" for case in CASES])
def test_it_is_caught_where_rounding_may_differ(name: str, make: Callable[[], Step], what: str) -> None:
    verdict = judged(make(), WRONG[name], FUSED)
    assert not verdict.equivalent and verdict.culprit == name and verdict.exactness == "reordered"
    assert what in verdict.worst.what
    assert verdict.worst.error is not None and verdict.worst.bound is not None and verdict.worst.error > 100 * verdict.worst.bound


def in_bfloat16() -> Step:
    """Its own rounding is a hundredth of each gradient."""
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(6, 16, dtype=torch.bfloat16))


def with_autocast_in_its_loss() -> Step:
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (model(x) - x).abs().mean()

    return Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(6, 64))


def slightly_weakened() -> SmallLever:
    """A twentieth of each gradient that is missing, with the loss as it was."""

    def act(step: Step, undo: Undo) -> None:
        for parameter in step.models[""].parameters():
            undo.then(parameter.register_hook(lambda gradient: gradient * 0.95).remove)

    return SmallLever("slightly weakened", "bitwise", act)


@pytest.mark.parametrize("make", [in_bfloat16, with_autocast_in_its_loss])
@pytest.mark.parametrize("wrong", [WRONG["light parts"], slightly_weakened(), WRONG["lost part"], WRONG["weakened"]], ids=lambda w: w.name)
def test_coarse_numbers_excuse_no_wrong_gradient(make: Callable[[], Step], wrong: SmallLever) -> None:
    """A bound of a few per cent is what they need; the same step in float64 tells."""
    verdict = judged(make(), CHECKPOINT, wrong, FUSED)
    assert not verdict.equivalent and verdict.culprit == wrong.name and verdict.exactness == "reordered"
    right = judged(make(), CHECKPOINT, SPLIT, FUSED)
    assert right.equivalent and not right.notes


@pytest.mark.parametrize("name", ["modified", "detached", "weakened", "slower"])
def test_it_is_caught_under_micro_batches(name: str) -> None:
    assert judged(ragged(), CHECKPOINT, SPLIT, WRONG[name]).culprit == name


def test_two_wrong_levers_are_both_named() -> None:
    verdict = judged(ragged(), WRONG["weakened"], NOTHING, WRONG["slower"])
    assert verdict.culprit == "weakened and slower"


def test_a_lever_that_breaks_the_step_is_blamed() -> None:
    verdict = judged(ragged(), NOTHING, WRONG["raising"], SPLIT)
    assert not verdict.equivalent and verdict.culprit == "raising"
    assert verdict.worst.what == "the fitted step raised RuntimeError: a saved tensor was lost" and verdict.worst.error is None
    assert verdict.loss["fitted"] is None and verdict.loss["reference"] is not None


def test_levers_that_are_wrong_only_together_are_not_blamed_singly() -> None:
    """Each of the two would be undone by the other's absence: dropping either one cures the plan, and the first is named."""

    def half(step: Step, undo) -> None:  # type: ignore[no-untyped-def]
        group = step.optimizers[0].param_groups[0]
        group["marks"] = group.get("marks", 0) + 1
        undo.then(group.pop, "marks", None)
        if group["marks"] == 2:
            WRONG["slower"].act(step, undo)

    one, two = SmallLever("one", "bitwise", half), SmallLever("two", "bitwise", half)
    assert judged(ragged(), one, NOTHING, two).culprit == "one"


def test_require_raises_with_tensor_error_bound_and_lever() -> None:
    verdict = judged(ragged(), WRONG["weakened"], FUSED)
    with pytest.raises(NotEquivalent) as no:
        require(verdict)
    assert no.value.exit_code == 1 and no.value.culprit == "weakened" and no.value.error == verdict.worst.error
    assert str(no.value).startswith("The fitted step is not the same training: the gradient of 0.weight is off by 0.0")
    assert str(no.value).endswith("is allowed.\nThe lever to blame is weakened: plan without it.")
    with pytest.raises(NotEquivalent, match=r"the fitted step raised RuntimeError: a saved tensor was lost\.\nThe lever to blame"):
        require(judged(ragged(), WRONG["raising"]))


def warming_up(steady: bool = True) -> Step:
    """Its learning rate is 0 so far: what becomes of a gradient shows in no parameter. Where it is not steady, no two runs are alike."""
    net, count = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 4)), [0]
    net.register_buffer("seen", torch.ones(3))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        count[0] += not steady
        return model(x + 1e-4 * count[0]).pow(2).mean()

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.0), torch.randn(6, 16))


def _detached_later(step: Step, undo: Undo) -> None:
    """The first step of a few is whole; those after it lose what comes before the last layer."""
    seen: list[int] = []

    def cut(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(1)
        return args if len(seen) % 3 == 1 else tuple(a.detach() for a in args)

    undo.then(step.models[""][-1].register_forward_pre_hook(cut).remove)  # type: ignore[index]


def _buffer_lost(step: Step, undo: Undo) -> None:
    net = step.models[""]
    undo.then(net._buffers.__setitem__, "seen", net.seen)
    undo.then(net.register_forward_hook(lambda *call: net._buffers.__setitem__("seen", None)).remove)


LATER = SmallLever("detached later", "bitwise", _detached_later)
BUFFER = SmallLever("buffer lost", "bitwise", _buffer_lost)


@pytest.mark.parametrize("wrong", [WRONG["detached"], BUFFER, LATER, WRONG["other masks"]], ids=lambda wrong: wrong.name)
def test_what_is_missing_is_no_less_wrong_where_a_step_does_not_repeat_itself(wrong: SmallLever) -> None:
    assert judged(warming_up(steady=False), NOTHING, CHECKPOINT).equivalent
    verdict = judged(warming_up(steady=False), NOTHING, wrong)
    assert not verdict.equivalent and verdict.culprit == wrong.name and verdict.exactness == "bitwise"
    assert ("missing" in verdict.worst.what) is (wrong.name != "other masks")


@pytest.mark.parametrize("wrong", [WRONG["detached"], BUFFER, LATER], ids=lambda wrong: wrong.name)
def test_what_is_missing_is_caught_where_rounding_may_differ(wrong: SmallLever) -> None:
    verdict = judged(warming_up(), wrong, FUSED)
    assert not verdict.equivalent and verdict.culprit == wrong.name and "missing" in verdict.worst.what


def _refusing(step: Step, undo: Undo) -> None:
    raise CannotApply("refusing does not suit this step. Leave it out.")


def _at_a_loss(step: Step, undo: Undo) -> None:
    """As where random numbers turn out not to be replayable, once the step runs."""

    @contextmanager
    def context(phase: str) -> Iterator[None]:
        raise CannotApply("microbatch cannot give each micro-batch its random numbers. Leave it out.")
        yield

    enter = context
    step.running.around_loss.append(enter)
    undo.then(step.running.around_loss.remove, enter)


REFUSING, AT_A_LOSS = SmallLever("refusing", "bitwise", _refusing), SmallLever("at a loss", "bitwise", _at_a_loss)


@pytest.mark.parametrize("wrong", [REFUSING, AT_A_LOSS], ids=lambda wrong: wrong.name)
def test_a_lever_that_does_not_suit_the_step_is_blamed_and_not_the_user(wrong: SmallLever) -> None:
    step = ragged()
    for levers in ((wrong,), (NOTHING, wrong, SPLIT)):
        verdict = judged(step, *levers)
        assert not verdict.equivalent and verdict.culprit == wrong.name and step.running == Running()
        assert verdict.worst.what.startswith("the fitted step cannot be run: ") and verdict.worst.what.endswith("Leave it out")
    both = judged(step, wrong, NOTHING, WRONG["weakened"])
    assert not both.equivalent and both.culprit == ("at a loss and weakened" if wrong is AT_A_LOSS else "weakened")


def test_a_lever_that_only_acts_beside_another_is_not_blamed_for_that() -> None:
    def needing(step: Step, undo: Undo) -> None:
        if step.running.split is None:
            raise CannotApply("There is nothing to join.")

    verdict = judged(ragged(), SPLIT, SmallLever("joining", "bitwise", needing), WRONG["weakened"], WRONG["slower"])
    assert verdict.culprit == "weakened and slower"


def test_a_lever_that_nobody_knows_is_the_users_to_mend() -> None:
    step = ragged()
    with pytest.raises(PlanError, match="which this memfit does not have"):
        verify(step, plan_of(step, NOTHING), levers={})
