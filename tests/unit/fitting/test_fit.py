"""`memfit.fit` on small steps: what it gives, what it leaves behind, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
from memfit import capture as capturing
from memfit.errors import Infeasible, MemfitError, NotEquivalent
from memfit.fitting import fit as fitting
from memfit.fitting import proven_plans
from memfit.fitting.applying import apply_levers
from memfit.fitting.plan_search import FoundPlan
from memfit.fitting.trial import slowdown_of
from memfit.levers import LEVERS, Undo
from memfit.records import Option, Trace
from memfit.step import Step
from memfit.step.running import Running
from small_levers import CHECKPOINT, NOTHING, SPLIT, WRONG, SmallLever, plan_of
from small_steps import convolutional_3d, dense, in_place_ops, two_phases

ENOUGH = "16GiB"


def state_of(step: Step) -> list[torch.Tensor]:
    tensors = [t for model in step.models.values() for t in (*model.parameters(), *model.buffers())]
    states = [t for o in step.optimizers for state in o.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*tensors, *states, torch.get_rng_state())]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ours) == len(others) and all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def trained(make: Callable[[], Step], run: Callable[[Step], Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    step = make()
    run(step)
    return state_of(step)


def two_plain_steps(step: Step) -> None:
    for _ in range(2):
        step.run(step.batch)


def planned(monkeypatch: pytest.MonkeyPatch, *levers: SmallLever) -> dict[str, Any]:
    """Let `fit` use a plan that a small step would never need; the answer is what to hand to it."""

    def plan(step: Step, budget: object, **options: object) -> FoundPlan:
        plain, plan = memfit.profile(step, simulate=True), plan_of(step, *levers)
        with apply_levers(step, plan.levers, {lever.name: lever for lever in levers}), suppress(Exception):  # hooks are not simulated
            return FoundPlan(plan, plain, memfit.profile(step, simulate=True))
        return FoundPlan(plan, plain, plain)

    monkeypatch.setattr(proven_plans, "find_plan", plan)
    return {"budget": ENOUGH, "levers": {lever.name: lever for lever in levers}}


@pytest.mark.parametrize("make", [dense, convolutional_3d, in_place_ops, two_phases])
def test_inside_the_budget_a_fitted_step_is_the_plain_one(make: Callable[[], Step]) -> None:
    def fitted_steps(step: Step) -> None:
        fitted = memfit.fit(step, ENOUGH)
        assert fitted.plan.levers == () and fitted.verdict.equivalent and fitted.ledger.predicted
        for _ in range(2):
            fitted(step.batch)

    assert same(trained(make, fitted_steps), trained(make, two_plain_steps))


def test_levers_are_on_while_fitted_and_the_loss_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    step = dense()
    fitted = memfit.fit(step, **planned(monkeypatch, CHECKPOINT, SPLIT))
    loss = fitted(step.batch)
    assert isinstance(loss, float) and step.running.split is not None
    assert fitted.verdict.equivalent and fitted.verdict.levers == ("checkpoint", "split")
    assert len(fitted.ledger.timeline) > 4 * len(fitted.baseline.timeline)  # of the fitted and of the plain step
    ratio, how = slowdown_of(fitted)
    seconds = fitted.verdict.step_seconds
    assert how == "measured" and ratio == seconds["fitted"] / seconds["reference"] and fitted.verdict.samples == step.batch_size
    assert slowdown_of(replace(fitted, verdict=replace(fitted.verdict, samples=1)))[1] == "predicted"


def test_the_plain_and_the_fitted_step_are_simulated_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    middle = (layer for _ in range(2) for layer in (torch.nn.GELU(), torch.nn.Linear(256, 256)))
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), *middle)
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(32768, 64))
    plain = memfit.profile(step, simulate=True)
    seen: list[int] = []
    real = capturing.capture_simulated

    def counted(step: Step, *asked: Any) -> Trace:
        seen.append(step.batch_size)
        return real(step, *asked)

    def planned(*asked: Any, **wishes: Any) -> FoundPlan:
        found = real_planned(*asked, **wishes)
        captured.extend(seen)  # the plain step, and each proposal until one fits
        return found

    captured: list[int] = []
    real_planned = proven_plans.find_plan
    monkeypatch.setattr(proven_plans, "find_plan", planned)
    monkeypatch.setattr(capturing, "capture_simulated", counted)
    fitted = memfit.fit(step, plain.process_high_bytes - plain.peak_bytes // 3, levers={"saved": LEVERS["saved"]})
    assert fitted.plan.levers and len(captured) >= 2
    assert step.batch_size not in seen[len(captured) :]  # later only smaller batches, to find one for the proof
    assert fitted.baseline.peak_bytes == plain.peak_bytes > fitted.ledger.peak_bytes == fitted.plan.predicted_peak_bytes
    seen.clear()
    fitted.undo()
    memfit.fit(step, ENOUGH)
    assert seen == [step.batch_size]


def test_phases_give_a_loss_each() -> None:
    step = two_phases()
    losses = memfit.fit(step, ENOUGH)(step.batch)
    assert isinstance(losses, dict) and list(losses) == ["generator", "critic"]


@pytest.mark.parametrize("make", [dense, in_place_ops, two_phases])
def test_after_undo_the_step_is_the_plain_one_bit_for_bit(make: Callable[[], Step], monkeypatch: pytest.MonkeyPatch) -> None:
    options = planned(monkeypatch, CHECKPOINT, NOTHING)

    def fitted_undone(step: Step) -> None:
        fitted = memfit.fit(step, **options)
        fitted.undo()
        fitted.undo()
        assert step.running == Running()
        two_plain_steps(step)

    assert same(trained(make, fitted_undone), trained(make, two_plain_steps))


@pytest.mark.parametrize("error", [RuntimeError("the loader broke"), KeyboardInterrupt()])
def test_an_error_inside_leaves_the_step_usable(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    fails: list[bool] = []

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if fails:
            raise error
        return model(batch).pow(2).mean()

    def make() -> Step:
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        return Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(4, 8))

    options = planned(monkeypatch, CHECKPOINT)

    def interrupted(step: Step) -> None:
        fitted = memfit.fit(step, **options)
        fails.append(True)
        with pytest.raises(type(error)):
            fitted(step.batch)
        fails.clear()
        fitted(step.batch)
        fitted.undo()
        step.run(step.batch)

    assert same(trained(make, interrupted), trained(make, two_plain_steps))


def test_backward_adds_gradients_and_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, step = dense(), dense()
    step.model.load_state_dict(plain.model.state_dict())  # type: ignore[union-attr]
    fitted = memfit.fit(step, **planned(monkeypatch, CHECKPOINT))
    before = state_of(step)
    for _ in range(2):
        assert fitted.backward(plain.batch) == float(plain.differentiate(plain.all_phases[0], plain.batch))
    gradients = [[p.grad for p in s.models[""].parameters()] for s in (step, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and same(state_of(step), before)  # type: ignore[arg-type]


def test_memory_is_given_back_in_a_loop_of_ones_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def act(step: Step, undo: Undo) -> None:
        after: Callable[[], object] = lambda: called.append(len([p for p in step.models[""].parameters() if p.grad is not None]))  # noqa: E731
        step.running.after_step.append(after)
        undo.then(step.running.after_step.remove, after)

    step = dense()
    fitted = memfit.fit(step, **planned(monkeypatch, SmallLever("trimming", "bitwise", act)))
    called.clear()
    fitted.backward(step.batch)
    assert called == [4]  # once, with the gradients there
    fitted(step.batch)
    assert len(called) == 2


class _Guard:
    def begins(self, *told: Any) -> None: ...
    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def lets_step(self, *told: Any) -> bool:
        return True


def _scaling(step: Step, undo: Undo) -> None:
    step.running.guard = _Guard()
    undo.then(setattr, step.running, "guard", None)


def _stepping(step: Step, undo: Undo) -> None:
    step.running.steps_in_backward.extend(step.optimizers)
    undo.then(step.running.steps_in_backward.clear)


@pytest.mark.parametrize(
    ("make", "act", "words"),
    [
        (two_phases, lambda step, undo: None, "This step has phases (generator, critic), and each needs the one before it to have stepped"),
        (dense, _stepping, "takes its step inside backward, so no gradients are left to look at: call fitted(batch)"),
        (dense, _scaling, "This step's loss is scaled, and so are its gradients until the optimizer steps: call fitted(batch)"),
    ],
)
def test_backward_alone_is_refused_where_it_would_mislead(
    make: Callable[[], Step], act: Callable[[Step, Undo], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make()
    fitted = memfit.fit(step, **planned(monkeypatch, SmallLever("acting", "bitwise", act)))
    with pytest.raises(MemfitError) as error:
        fitted.backward(step.batch)
    assert words in str(error.value)


def test_an_undone_step_is_not_run_by_mistake() -> None:
    step = dense()
    fitted = memfit.fit(step, ENOUGH)
    fitted.undo()
    for call in (fitted, fitted.backward):
        with pytest.raises(MemfitError, match="This fitted step was undone, so nothing keeps it inside its budget: fit the step again"):
            call(step.batch)


def test_what_is_not_the_same_training_is_refused_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    step = dense()
    before = state_of(step)
    with pytest.raises(NotEquivalent, match="The lever to blame is weakened"):
        memfit.fit(step, **planned(monkeypatch, WRONG["weakened"]))
    assert step.running == Running() and same(state_of(step), before)


def test_the_verdict_of_the_final_plan_still_names_the_lever_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, real = dense(), plan_of(dense(), NOTHING)
    levers = {lever.name: lever for lever in (WRONG["weakened"], WRONG["slower"], NOTHING)}
    plain = memfit.profile(step, simulate=True)

    def plan(step: Step, budget: object, *, levers: Mapping[str, SmallLever], **options: object) -> FoundPlan:
        return FoundPlan(plan_of(step, *levers.values()), plain, plain)

    monkeypatch.setattr(proven_plans, "find_plan", plan)
    fitted = memfit.fit(step, ENOUGH, levers=levers)
    assert fitted.plan.levers == real.levers and fitted.verdict.equivalent
    (note,) = fitted.verdict.notes
    assert note.startswith(
        "Planned without weakened and slower, which failed the proof. The fitted step is not the same training: the grad"
    )


def test_another_training_that_was_asked_for_is_let_through_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = dense()
    altered = SmallLever("altering", "altered", WRONG["slower"].act)
    fitted = memfit.fit(step, allow="altered", **planned(monkeypatch, altered))
    assert not fitted.verdict.equivalent and fitted.verdict.exactness == "altered"


@pytest.mark.parametrize("exactness", ["redrawn", "altered"])
@pytest.mark.parametrize("beside", [(), (NOTHING, CHECKPOINT)], ids=["alone", "beside"])
def test_what_was_asked_for_is_refused_where_it_does_not_even_run(
    exactness: str, beside: tuple[SmallLever, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = dense()
    broken = SmallLever("asked for", exactness, WRONG["raising"].act)
    with pytest.raises(NotEquivalent, match=r"raised RuntimeError: a saved tensor was lost\.\nThe lever to blame is asked for") as no:
        memfit.fit(step, allow=exactness, **planned(monkeypatch, *beside, broken))
    assert step.running == Running() and not no.value.verdict.by_design and no.value.verdict.exactness == exactness


@pytest.mark.parametrize("exactness", ["redrawn", "altered"])
@pytest.mark.parametrize("name", ["weakened", "raising", "light parts"])
def test_a_lever_that_was_asked_for_excuses_no_wrong_one_beside_it(exactness: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, asked = replace(dense(), batch=torch.randn(6, 64)), replace(NOTHING, exactness=exactness)
    with pytest.raises(NotEquivalent, match=f"The lever to blame is {name}") as no:
        memfit.fit(step, allow=exactness, **planned(monkeypatch, asked, WRONG[name]))
    assert step.running == Running() and no.value.verdict.exactness == WRONG[name].exactness
    fitted = memfit.fit(step, allow=exactness, **planned(monkeypatch, asked, SPLIT))
    verdict = fitted.verdict
    assert not verdict.equivalent and verdict.by_design and verdict.exactness == exactness and verdict.culprit == "nothing"
    assert verdict.compared["gradients"] == 4  # with the other lever, which was held to its own class
    how = "with nothing on both sides" if exactness == "altered" else "without nothing"
    assert verdict.notes[-1] == f"split was held to reordered {how}."


def test_redrawn_excuses_no_wrong_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    step, redrawn = dense(), SmallLever("redrawn", "redrawn", WRONG["slower"].act)
    with pytest.raises(NotEquivalent, match=r"after the step is off by .*\nThe lever to blame is redrawn"):
        memfit.fit(step, allow="redrawn", **planned(monkeypatch, redrawn))


def test_an_impossible_budget_raises_and_changes_nothing() -> None:
    step = dense()
    before = state_of(step)
    with pytest.raises(Infeasible, match=r"This step does not fit 1\.00 MiB: the lowest that can be reached"):
        memfit.fit(step, "1MiB")
    assert step.running == Running() and same(state_of(step), before)


def test_what_a_resume_needs_is_told_and_another_plan_s_refused() -> None:
    plain = memfit.fit(dense(), ENOUGH)
    assert plain.state_dict() == {}
    plain.load_state_dict({})
    with pytest.raises(MemfitError) as caught:
        plain.load_state_dict({"guard": {}})
    assert str(caught.value) == "This fitted step has no guard of its losses, and the saved one had one: fit it with the plan it had."
    with LEVERS["precision"].apply(plain.step, Option("precision", "", "rounded", {"dtype": "bfloat16"})):
        state = plain.state_dict()
        assert state == {"guard": {"skipped": 0, "scales": {}}}
        plain.load_state_dict(state)
        with pytest.raises(MemfitError, match="has a guard of its losses, and the saved one had none"):
            plain.load_state_dict({})


class Hoarder:
    """Keeps fresh memory whenever a plan is verified, as a program might that loads its data meanwhile."""

    def __init__(self, times: int) -> None:
        self.times, self.kept = times, list[bytearray]()

    def __call__(self, words: str) -> None:
        if words == "verifying the plan" and len(self.kept) < self.times:
            self.kept.append(bytearray(b"x" * (160 << 20)))


def test_what_the_process_grew_by_meanwhile_counts() -> None:
    now = memfit.profile(convolutional_3d(), simulate=True).process_high_bytes
    roomy = memfit.fit(convolutional_3d(), now + (256 << 20), progress=Hoarder(times=1))
    assert roomy.plan.levers == ()
    roomy.undo()
    del roomy
    now = memfit.profile(convolutional_3d(), simulate=True).process_high_bytes
    hoarder = Hoarder(times=1)
    with pytest.raises(Infeasible, match="does not fit"):  # planned again with what is there by now, the step is too large
        memfit.fit(convolutional_3d(), now + (48 << 20), progress=hoarder)
    assert len(hoarder.kept) == 1


def test_what_a_first_step_brings_is_counted_once() -> None:
    """Kernels and threads that the proof has brought into the process are there when it is planned again."""
    step = dense()
    now = memfit.profile(step, simulate=True)
    cold = replace(now, process=replace(now.process, base_bytes=now.process.base_bytes - (64 << 20)))
    again = proven_plans.find_plan(step, ENOUGH, first=cold).plain
    assert now.process.base_bytes - again.process.base_bytes > 30 << 20
    assert now.process_high_bytes - again.process_high_bytes > 30 << 20


def test_a_process_that_never_stops_growing_is_an_honest_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_high_by_now", lambda step, fitted: 2**60)
    with pytest.raises(Infeasible, match=r"grows while it is planned for.*Fit before other threads"):
        memfit.fit(dense(), ENOUGH)
