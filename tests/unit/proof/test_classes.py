"""What each class of exactness is held to, and what a verdict says where the usual comparison is impossible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit import MemfitError, Step, profile, verify
from memfit.capture.process import resident_bytes
from memfit.levers import Undo
from memfit.proof import require
from memfit.records import PlannedLever, Verdict
from memfit.report.verdict_view import verdict_view
from memfit.step.running import Running
from small_levers import CHECKPOINT, FUSED, NOTHING, SPLIT, WRONG, SmallLever, _around, plan_of
from small_steps import convolutional_2d, dense, mixed_precision, two_phases


def judged(step: Step, *levers: SmallLever, settings: dict[str, Any] | None = None, **options: Any) -> Verdict:
    planned = tuple(PlannedLever(lever.name, lever.name, lever.exactness, settings=settings or {}) for lever in levers)
    return verify(step, replace(plan_of(step), levers=planned), levers={lever.name: lever for lever in levers}, **options)


@contextmanager
def _half(step: Step) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


HALF = SmallLever("half", "rounded", _around(_half))


def test_rounded_reports_its_error_and_bound() -> None:
    verdict = judged(dense(), NOTHING, HALF, settings={"dtype": "bfloat16"})
    assert verdict.equivalent and verdict.exactness == "rounded" and not verdict.culprit
    assert verdict.worst.error and verdict.worst.bound and verdict.worst.error < verdict.worst.bound
    assert verdict.loss["reference"] != verdict.loss["fitted"]
    assert verdict.notes[0].startswith("Rounded, with eps 0.0078: loss and gradients were held to 3 times")


def test_rounding_is_not_passed_off_as_reordering() -> None:
    verdict = judged(dense(), replace(HALF, exactness="reordered"))
    assert not verdict.equivalent and verdict.culprit == "half"
    coarse, fine = (judged(dense(), HALF, settings={"dtype": name}).worst.bound for name in ("bfloat16", "float16"))
    assert coarse and fine and coarse > 4 * fine  # the bound is that of the type


@pytest.mark.parametrize("name", ["weakened", "detached", "lost part", "slower", "stale"])
def test_rounding_excuses_no_wrong_lever(name: str) -> None:
    wrong = WRONG[name]
    if name == "slower":
        wrong = SmallLever("slower", "bitwise", lambda step, undo: [WRONG["slower"].act(step, undo) for _ in range(400)] and None)
    verdict = judged(dense(), HALF, wrong) if name != "lost part" else judged(replace(dense(), batch=torch.randn(6, 64)), HALF, wrong)
    assert not verdict.equivalent and verdict.culprit == name


def test_what_is_stale_fails_a_rounded_plan_by_the_gradients_of_the_second_step() -> None:
    """The first step is right, and the losses of a few are hardly touched."""
    verdict = judged(dense(), HALF, WRONG["stale"])
    assert verdict.worst.what == "all gradients, a step later," and not verdict.equivalent
    right = judged(dense(), HALF)
    assert right.equivalent and len(right.trajectory["fitted"]) == 3


def test_a_loss_that_goes_astray_fails_a_rounded_plan() -> None:
    """From the third step on, when gradients are not looked at any more."""

    def act(step: Step, undo: Undo) -> None:
        seen: list[int] = []

        def astray(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return output * (2.0 if len(seen) % 3 == 0 else 1.0)

        undo.then(step.models[""].register_forward_hook(astray).remove)

    verdict = judged(dense(), HALF, SmallLever("astray", "bitwise", act))
    assert not verdict.equivalent and verdict.worst.what == "the loss of step 3" and verdict.culprit == "astray"


def test_altered_is_never_equivalent_even_if_nothing_differs() -> None:
    verdict = judged(dense(), CHECKPOINT, replace(NOTHING, exactness="altered"))
    assert not verdict.equivalent and verdict.by_design and verdict.exactness == "altered" and verdict.culprit == "nothing"
    assert verdict.notes[0].startswith("Not equivalent by design: nothing changes the model or the training.")


def of_width(width: int, compares: bool, **more: Any) -> Step:
    """A step whose samples are as wide as its model; whether its loss `compares` them."""
    net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m(x)
        return (y - x - (y.mean(0) if compares else 0)).pow(2).mean()

    return Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(8, width), **more)


@pytest.mark.parametrize("compares", [False, True])
def test_levers_beside_another_model_are_compared_on_that_model_and_its_own_batch(compares: bool) -> None:
    step = of_width(16, compares, variants={"narrow": lambda: of_width(8, compares)})
    narrow = PlannedLever("architecture", "narrow", "altered", settings={"variant": "narrow"})
    halves = PlannedLever("microbatch", "halves", "reordered", settings={"size": 4, "batch": 8, "draws": {}, "again": False})
    alone, both = (verify(step, replace(plan_of(step), levers=rows)) for rows in ((narrow,), (narrow, halves)))
    assert alone.by_design and not alone.equivalent and alone.loss["fitted"] is not None and alone.culprit == "architecture"
    if compares:
        assert not both.by_design and both.culprit == "microbatch" and both.exactness == "reordered"
        assert "compares samples with each other" in both.culprit_because
    else:
        assert both.by_design and both.exactness == "altered" and both.culprit == "architecture"
    assert both.notes[-1] == "microbatch was held to reordered with architecture on both sides."
    assert step.models[""][0].in_features == 16 and step.batch.shape == (8, 16) and step.running == Running()  # type: ignore[index]


def test_redrawn_is_equivalent_in_distribution_only() -> None:
    step = convolutional_2d()
    verdict = judged(step, replace(WRONG["other masks"], exactness="redrawn"))
    assert not verdict.equivalent and verdict.exactness == "redrawn" and verdict.culprit == "other masks"
    assert verdict.notes[0].startswith("Equivalent in distribution only: other masks draws other random numbers")
    assert verdict.compared == {"gradients": 0, "buffers": 1, "rng": 0, "optimizer_state": 8, "parameters": 8}


def test_a_step_that_does_not_repeat_itself_is_held_to_its_own_noise() -> None:
    count = [0]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return model(x + 1e-4 * count[0]).pow(2).mean()  # something that no rolling back reaches

    step = replace(dense(), loss=loss)
    verdict = judged(step, CHECKPOINT)
    assert any(note.startswith("Two runs of the plain step differ already") for note in verdict.notes)
    assert not judged(step, WRONG["weakened"]).equivalent


def test_redrawn_beside_what_rounds_is_no_yes() -> None:
    verdict = judged(dense(), HALF, replace(NOTHING, exactness="redrawn"))
    assert verdict.by_design and not verdict.equivalent and verdict.culprit == "nothing"
    assert verdict_view(verdict).meaning == "The fitted step is the same training in distribution only."
    assert judged(dense(), HALF, WRONG["stale"], replace(NOTHING, exactness="redrawn")).culprit == "stale"


class OnlyFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise TypeError("this kernel takes float32")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def without_float64() -> Step:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    adam = torch.optim.Adam(net.parameters())
    return Step(net, lambda m, x: OnlyFloat32.apply(m(x)).pow(2).mean(), adam, torch.randn(5, 16))


def test_without_float64_the_noise_of_rounding_is_measured_and_said() -> None:
    verdict = judged(without_float64(), SPLIT, FUSED)
    assert verdict.equivalent
    assert "There was no float64 run to compare with: it raised TypeError: this kernel takes float32." in verdict.notes[0]
    assert torch.get_default_dtype() is torch.float32


def test_coarse_numbers_without_float64_are_said_to_be_compared_roughly() -> None:
    step = without_float64()
    step = replace(step, model=step.models[""].bfloat16(), batch=step.batch.bfloat16())
    verdict = judged(step, SPLIT)
    assert verdict.equivalent
    told = re.match(
        r"A rough comparison: without a float64 run of both steps gradients were held to no more than ([\d.]+) of", verdict.notes[1]
    )
    assert told and 0.09 < float(told[1]) < 1


def test_a_lever_that_float64_cannot_be_run_with_is_compared_roughly_too() -> None:
    def act(step: Step, undo: Undo) -> None:
        undo.then(step.models[""].register_forward_pre_hook(lambda module, args: (OnlyFloat32.apply(args[0]) / 2,)).remove)

    step = replace(dense(), batch=dense().batch.bfloat16())
    verdict = judged(replace(step, model=step.models[""].bfloat16()), SmallLever("picky", "reordered", act))
    assert verdict.equivalent
    assert "without a float64 run of both steps (it raised TypeError: this kernel takes float32) gradients were held" in verdict.notes[0]


@pytest.mark.parametrize("name", ["unweighted", "lost part", "clipped parts"])
def test_without_float64_wrong_plans_are_caught_all_the_same(name: str) -> None:
    assert judged(without_float64(), WRONG[name], CHECKPOINT).culprit == name


def test_a_float64_step_is_judged_by_its_own_noise() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(5, 16, dtype=torch.float64))
    verdict = judged(step, SPLIT)
    assert verdict.equivalent and "the step computes in float64 itself" in verdict.notes[0]
    assert not judged(step, WRONG["unweighted"]).equivalent


def test_a_constant_of_the_loss_and_a_network_it_holds_join_the_float64_run() -> None:
    teacher, classes = nn.Linear(16, 4).requires_grad_(False), torch.rand(4)
    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noisy = x + 0.1 * torch.randn(x.shape, dtype=torch.float32)
        return ((model(noisy) - teacher(x).float()) * classes).pow(2).mean()

    step = Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(6, 16))
    verdict = judged(step, CHECKPOINT, FUSED)
    assert verdict.equivalent and not verdict.notes
    assert teacher.weight.dtype is torch.float32


def heavy() -> Step:
    net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(8192, 256))


def test_a_reference_that_does_not_fit_is_run_on_fewer_samples() -> None:
    step = heavy()
    needed = profile(step, simulate=True).process_high_bytes
    verdict = judged(step, CHECKPOINT, limit_bytes=needed - 30 * 2**20)
    assert verdict.equivalent
    told = re.fullmatch(
        r"Compared on the first (\d+) of 8192 samples: the plain step is predicted to need .* for all of them, and the limit is .* "
        r"What only shows on the other (\d+), or on a batch of 8192, was not compared\.",
        verdict.notes[0],
    )
    assert told and int(told[1]) + int(told[2]) == 8192 and int(told[1]) >= 1024
    assert not judged(step, CHECKPOINT, limit_bytes=2 * needed).notes


def test_without_a_limit_the_machines_memory_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for steps that do not fit the machine: to run one of them in full would take it down."""
    step = heavy()
    needed = profile(step, simulate=True).process_high_bytes
    monkeypatch.setattr("memfit.proof.limit.memory_left", lambda: needed)
    verdict = judged(step, CHECKPOINT)
    assert verdict.equivalent and verdict.samples < step.batch_size
    assert re.search(r"for all of them, and this machine has .* for it\. What only shows on the other", verdict.notes[0])
    monkeypatch.setattr("memfit.proof.limit.memory_left", lambda: 0)
    monkeypatch.setattr("memfit.proof.limit.resident_bytes", lambda: 1)  # this process may hold more already than the step takes
    held = resident_bytes()
    with pytest.raises(MemfitError, match=r"inside .*B, which is what this machine has for it: a single sample is predicted to need"):
        judged(step, CHECKPOINT)
    assert resident_bytes() - held < 200 << 20
    assert judged(step, CHECKPOINT, limit_bytes=2 * needed).samples == step.batch_size  # the user knows better


def test_what_cannot_be_simulated_is_run_where_nobody_has_set_a_limit() -> None:
    step = dense()
    asked = replace(step, loss=lambda m, x: m(x).pow(2).mean() * (1.0 if x.sum().item() else 2.0))
    assert judged(asked, CHECKPOINT).samples == step.batch_size
    with pytest.raises(MemfitError, match="cannot be simulated"):
        judged(asked, CHECKPOINT, limit_bytes=8 << 30)


def test_a_limit_below_everything_is_refused() -> None:
    with pytest.raises(MemfitError, match=r"a single sample is predicted to need .* nothing to compare with"):
        judged(heavy(), CHECKPOINT, limit_bytes=2**20)


def test_gradients_gone_inside_backward_are_said_to_be_unseen() -> None:
    """A hook that updates and frees as gradients come; nobody is told."""

    def act(step: Step, undo: Undo) -> None:
        optimizer = step.optimizers[0]
        held = [p for group in optimizer.param_groups for p in group["params"]]

        def update(parameter: torch.Tensor) -> None:
            others = [(p, p.grad) for p in held if p is not parameter]
            for p, _ in others:
                p.grad = None
            optimizer.step()
            parameter.grad = None
            for p, gradient in others:
                p.grad = gradient

        for p in held:
            undo.then(p.register_post_accumulate_grad_hook(update).remove)
        step.running.steps_in_backward.append(optimizer)
        undo.then(step.running.steps_in_backward.remove, optimizer)

    verdict = judged(dense(), SmallLever("inside", "bitwise", act))
    assert verdict.equivalent and verdict.compared["gradients"] == 0 and verdict.compared["parameters"] == 4
    (note,) = verdict.notes
    assert note == "4 gradients could not be seen before being freed inside backward: parameters and states were compared."
    assert not judged(dense(), SmallLever("inside", "bitwise", act), WRONG["weakened"]).equivalent


def test_gradients_behind_a_guard_are_seen_back_to_scale() -> None:
    class Scaled:
        def begins(self, *part: Any) -> None:
            """Nothing to prepare."""

        def scaled(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 1024

        def lets_step(self, phase: str, optimizers: Any) -> bool:
            for p in (p for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None):
                p.grad /= 1024
            return True

    def act(step: Step, undo: Undo) -> None:
        step.running.guard = Scaled()
        undo.then(setattr, step.running, "guard", None)

    verdict = judged(two_phases(), SmallLever("guarded", "bitwise", act))
    assert verdict.equivalent and verdict.compared["gradients"] == 6


def test_a_guard_may_look_for_its_scale_first() -> None:
    class Halving:
        scale = 2.0**140  # overflows, until it has been halved a few times

        def begins(self, *part: Any) -> None:
            """Nothing to prepare."""

        def scaled(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * self.scale

        def lets_step(self, phase: str, optimizers: Any) -> bool:
            gradients = [p.grad for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
            good = all(bool(torch.isfinite(g).all()) for g in gradients)
            for gradient in gradients:
                gradient /= self.scale
            if not good:
                self.scale /= 2**10
            return good

    def act(step: Step, undo: Undo) -> None:
        step.running.guard = Halving()
        undo.then(setattr, step.running, "guard", None)

    verdict = judged(dense(), SmallLever("guarded", "reordered", act))
    assert verdict.equivalent and verdict.notes[0].startswith("A guard skipped ")
    assert not judged(dense(), SmallLever("guarded", "reordered", act), WRONG["weakened"]).equivalent


def test_a_gradient_that_is_zero_but_for_rounding_does_not_fail_a_rounded_plan() -> None:
    """A bias before BatchNorm: its gradient is nothing but rounding."""
    assert judged(convolutional_2d(), HALF).equivalent


def test_a_step_that_rounds_by_itself_may_be_reordered() -> None:
    assert judged(mixed_precision(), SPLIT).equivalent
    assert judged(mixed_precision(), SPLIT, WRONG["weakened"]).culprit == "weakened"


def test_schedulers_stand_still_and_it_is_said() -> None:
    step = dense()
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizers[0], 1)
    verdict = judged(replace(step, scheduler=scheduler), CHECKPOINT)
    assert verdict.notes == ("Schedulers stood still during the comparison.",) and scheduler.last_epoch == 0
    assert require(verdict) is verdict
