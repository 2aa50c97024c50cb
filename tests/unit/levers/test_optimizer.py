from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from lever_law import differences, furniture, law_errors, made, options_of, simulated, state_after
from memfit import MemfitError, Step
from memfit.levers import LEVERS, CannotApply
from memfit.records import Option
from memfit.step.running import Part
from small_steps import SMALL_STEPS, dense, in_place_ops, two_phases

LEVER = LEVERS["optimizer"]
LOOP = Option("optimizer", "parameter by parameter", "bitwise", {"how": "loop"})
FUSED = Option("optimizer", "fused", "reordered", {"how": "fused"})
IN_BACKWARD = Option("optimizer", "step inside backward", "bitwise", {"how": "in backward"})


def mostly_parameters(kind: str = "Adam", sizes: tuple[int, ...] = (16, 128, 128, 32), **settings: Any) -> Callable[[], Step]:
    """A step whose peak lies where the optimizer is."""

    def make() -> Step:
        net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01, **settings)
        return Step(net, lambda model, x: model(x).pow(2).mean(), optimizer, torch.randn(2, sizes[0]))

    return make


KINDS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "SGD": {"weight_decay": 0.1, "momentum": 0.9},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_law_on_every_optimizer(kind: str) -> None:
    errors = law_errors(LEVER, mostly_parameters(kind, foreach=True, **KINDS[kind]))
    assert "step inside backward" in errors and "parameter by parameter" in errors
    assert all(abs(error) < 0.02 for error in errors.values()), errors


@pytest.mark.parametrize("name", ["convolutional_2d", "transformer", "shared_parameters", "frozen_decoder"])
def test_the_law_on_small_steps(name: str) -> None:
    errors = law_errors(LEVER, SMALL_STEPS[name])
    assert all(abs(error) < 0.02 for error in errors.values()), errors


def test_the_law_can_fail() -> None:
    make = mostly_parameters(foreach=True)
    assert abs(law_errors(Forgetful(), make)["step inside backward"]) > 0.02


class Forgetful(type(LEVER)):  # type: ignore[misc]
    """Updates inside backward, but keeps every gradient."""

    def apply(self, step: Step, option: Option) -> Any:
        undo = super().apply(step, option)
        kept: list[Any] = []
        step.running.around_loss.append(lambda phase: _keeping(step, kept))
        return undo


class _keeping:
    def __init__(self, step: Step, kept: list[Any]) -> None:
        for optimizer in step.optimizers:
            optimizer.register_step_post_hook(lambda o, *a: kept.extend(p.grad for g in o.param_groups for p in g["params"]))

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
def test_the_exactness_is_what_it_says(kind: str) -> None:
    make = mostly_parameters(kind, foreach=True, **KINDS[kind])
    plain = state_after(made(make))
    for option in options_of(LEVER, make).values():
        step = made(make)
        LEVER.apply(step, option)
        changed = state_after(step)
        if option.exactness == "bitwise":
            assert differences(plain, changed) == [], option.name
        for name, value in plain.items():
            torch.testing.assert_close(changed[name], value, rtol=1e-3, atol=1e-6)


def test_fused_is_not_bitwise() -> None:
    """Seen, not assumed: otherwise its class would be too careful."""
    plain, step = made(mostly_parameters()), made(mostly_parameters())
    LEVER.apply(step, FUSED)
    assert differences(state_after(plain), state_after(step))


@pytest.mark.parametrize("name", [n for n in SMALL_STEPS if n not in ("two_phases", "in_place_ops")])
def test_inside_backward_is_the_same_training(name: str) -> None:
    step = made(SMALL_STEPS[name])
    LEVER.apply(step, IN_BACKWARD)
    assert differences(state_after(made(SMALL_STEPS[name])), state_after(step)) == []
    assert all(p.grad is None for model in step.models.values() for p in model.parameters())


def test_sameness_can_fail() -> None:
    step = made(dense)
    LEVER.apply(step, IN_BACKWARD)
    step.running.steps_in_backward.append(step.optimizers[0])  # listed twice is stepped once
    assert differences(state_after(made(dense)), state_after(step)) == []
    twice = made(dense)
    twice.optimizers[0].register_step_post_hook(lambda o, *a: o.param_groups[0]["params"][0].data.mul_(1.0001))
    assert differences(state_after(made(dense)), state_after(twice))


def test_several_phases_without_clipping() -> None:
    def make() -> Step:
        step = two_phases()
        return replace(step, phases=[replace(phase, clip_grad_norm=None) for phase in step.phases])

    step = made(make)
    LEVER.apply(step, IN_BACKWARD)
    assert differences(state_after(made(make)), state_after(step)) == []
    assert abs(law_errors(LEVER, make)["step inside backward"]) < 0.02


def test_the_scheduler_is_read_at_every_step() -> None:
    def make() -> Step:
        step = dense()
        return replace(step, scheduler=torch.optim.lr_scheduler.StepLR(step.optimizers[0], 1, 0.5))

    step, constant = made(make), made(dense)
    LEVER.apply(step, IN_BACKWARD)
    LEVER.apply(constant, IN_BACKWARD)
    changed = state_after(step)
    assert differences(state_after(made(make)), changed) == []
    assert differences(state_after(constant), changed)
    assert step.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.001 / 8)


@pytest.mark.parametrize("option", [LOOP, FUSED, IN_BACKWARD], ids=lambda o: str(o.name))
def test_undo_restores(option: Option) -> None:
    step = made(mostly_parameters(foreach=True))
    before = furniture(step)
    undo = LEVER.apply(step, option)
    assert furniture(step) != before
    step.run(step.batch)
    undo()
    assert furniture(step) == before
    undo()
    assert furniture(step) == before


@pytest.mark.parametrize("option", [LOOP, FUSED, IN_BACKWARD])
@pytest.mark.parametrize("fitted_before", [True, False])
def test_a_training_is_resumed_and_given_more_to_train(option: Option, fitted_before: bool) -> None:
    """Loading exchanges the optimizer's groups, and a group may be added; undone, each has the flags of the plain one."""
    first, plain, step = (made(mostly_parameters("AdamW", foreach=True)) for _ in range(3))
    (theirs,), (one,), (other,) = first.optimizers, plain.optimizers, step.optimizers
    undo_first = LEVER.apply(first, option)
    first.run(first.batch)
    if not fitted_before:
        undo_first()
    undo = LEVER.apply(step, option)
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    undo_first()
    one.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for s in (plain, step):
        s.models[""].load_state_dict(first.models[""].state_dict())
        assert isinstance(s.model, nn.Sequential)
        s.model.append(nn.Linear(32, 8))
        s.model[-1].load_state_dict({"weight": torch.ones(8, 32), "bias": torch.zeros(8)})
        s.optimizers[0].add_param_group({"params": s.model[-1].parameters()})
    if option is not IN_BACKWARD:
        assert [(g["foreach"], bool(g["fused"])) for g in other.param_groups] == 2 * [(False, option is FUSED)]
    if option is LOOP or option is IN_BACKWARD:
        assert differences(state_after(plain), state_after(step)) == []
    undo()
    assert [(g["foreach"], bool(g["fused"])) for g in (*other.param_groups, other.defaults)] == 3 * [(True, False)]
    assert not other._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]


def test_an_error_in_the_middle_leaves_no_hooks() -> None:
    step = made(dense)
    LEVER.apply(step, IN_BACKWARD)
    before = furniture(step)
    handle = step.model[0].bias.register_hook(_fails)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        step.run(step.batch)
    handle.remove()
    assert furniture(step) == before


def _fails(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_an_interrupt_waits_for_the_last_update() -> None:
    plain, step = made(dense), made(dense)
    LEVER.apply(step, IN_BACKWARD)
    handle = step.model[2].weight.register_hook(lambda g: signal.raise_signal(signal.SIGINT))  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt):
        step.run(step.batch)
    handle.remove()
    plain.run(plain.batch)
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), step.model.parameters(), strict=True))  # type: ignore[union-attr]


def refusal(step: Step, option: Option) -> str:
    before = furniture(step)
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(step, option)
    assert furniture(step) == before
    return str(caught.value)


def test_inside_backward_is_refused_with_the_reason() -> None:
    end = "Let it come after backward, as it is."
    assert refusal(made(in_place_ops), IN_BACKWARD) == (
        "The optimizer's step cannot be taken inside backward: this step clips the norm of all gradients together, which is known only "
        f"after the last of them. {end}"
    )
    split = made(dense)
    split.running.split = lambda phase, batch: [Part(batch)]
    assert "this step's batch is split, and its gradients are sums" in refusal(split, IN_BACKWARD)
    guarded = made(dense)
    guarded.running.guard = Unscaled()
    assert "this step scales its loss" in refusal(guarded, IN_BACKWARD)
    assert "Rprop is not known to treat each parameter alone" in refusal(made(mostly_parameters("Rprop")), IN_BACKWARD)
    shared = made(dense)
    shared = replace(shared, optimizer=[shared.optimizers[0], torch.optim.SGD(shared.models[""].parameters(), 0.1)])
    assert "a parameter is held by several optimizers" in refusal(shared, IN_BACKWARD)


def nothing(*given: object) -> None: ...


@pytest.mark.parametrize(
    "register",
    [
        lambda step: step.optimizers[0].register_step_pre_hook(nothing),
        lambda step: step.optimizers[0].register_step_post_hook(nothing),
        lambda step: register_optimizer_step_pre_hook(nothing),
        lambda step: register_optimizer_step_post_hook(nothing),
    ],
)
def test_hooks_on_a_step_would_be_called_for_every_parameter(register: Any) -> None:
    step = made(dense)
    hook = register(step)
    try:
        assert "AdamW has hooks on its step, as moving averages of weights use them" in refusal(step, IN_BACKWARD)
    finally:
        hook.remove()
    LEVER.apply(step, IN_BACKWARD)()


class CheckpointedTwice(nn.Module):
    """One module called twice, each time inside a checkpoint of the kind that runs a backward of its own in backward."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(16, 16), reentrant
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def checkpointed_twice(reentrant: bool) -> Step:
    net = CheckpointedTwice(reentrant)
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 16))


def test_a_gradient_that_comes_in_parts_is_never_taken_for_a_whole_one() -> None:
    """Each of two backward passes inside backward gives its part of a gradient, and an update with the first would be wrong."""
    assert "step inside backward" not in options_of(LEVER, partial(checkpointed_twice, reentrant=True))
    step = made(partial(checkpointed_twice, reentrant=True))
    before = furniture(step)
    with LEVER.apply(step, IN_BACKWARD), pytest.raises(MemfitError) as caught:
        step.run(step.batch)
    assert "the gradient of a parameter of shape (16,) came in parts" in str(caught.value)
    assert "Updates of 4 parameters are done already" in str(caught.value) and "use_reentrant=False" in str(caught.value)
    assert furniture(step) == before


def test_a_checkpoint_that_is_not_reentrant_gives_whole_gradients() -> None:
    make = partial(checkpointed_twice, reentrant=False)
    assert "step inside backward" in options_of(LEVER, make)
    step = made(make)
    LEVER.apply(step, IN_BACKWARD)
    assert differences(state_after(made(make)), state_after(step)) == []


def used_aside(as_it_is: Callable[[torch.Tensor], torch.Tensor], frozen: bool = False) -> Step:
    """The last weight is used a second time, further up, where it gets no gradient, so that nothing there waits for its update."""
    net = nn.ModuleDict({"first": nn.Linear(16, 16), "last": nn.Linear(16, 16)})

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m["last"](m["first"](x) @ as_it_is(m["last"].weight)).pow(2).mean()

    trained = net["first"] if frozen else net
    net["last"].requires_grad_(not frozen)
    return Step(net, loss, torch.optim.SGD(trained.parameters(), 0.1), torch.randn(4, 16))


@pytest.mark.parametrize("as_it_is", [torch.Tensor.detach, lambda weight: weight.data], ids=["detached", "data"])
def test_a_weight_that_backward_reads_after_its_update(as_it_is: Any) -> None:
    assert "step inside backward" not in options_of(LEVER, partial(used_aside, as_it_is))
    assert "step inside backward" in options_of(LEVER, partial(used_aside, torch.Tensor.clone))
    assert "step inside backward" in options_of(LEVER, partial(used_aside, as_it_is, frozen=True))


def test_the_error_of_a_weight_that_backward_needs_as_it_was() -> None:
    step = made(partial(used_aside, torch.Tensor.detach))
    with LEVER.apply(step, IN_BACKWARD), pytest.raises(MemfitError) as caught:
        step.run(step.batch)
    assert str(caught.value) == (
        "The optimizer's step cannot be taken inside backward: backward needed a tensor as it was before an update, most likely a weight "
        "that this step also uses where it gets no gradient, as weight.detach(). Updates of 2 parameters are done already: load the last "
        "state you saved, and take the optimizer's lever off."
    )


class Unscaled:
    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def lets_step(self, phase: str, optimizers: Any) -> bool:
        return True


def test_a_split_or_guard_put_on_later_stops_the_step() -> None:
    for name, value in (("split", lambda phase, batch: [Part(batch)]), ("guard", Unscaled())):
        step = made(dense)
        LEVER.apply(step, IN_BACKWARD)
        setattr(step.running, name, value)
        with pytest.raises(MemfitError, match="takes its step inside backward"):
            step.run(step.batch)


def test_fused_is_refused_with_the_reason() -> None:
    assert refusal(made(mostly_parameters("RMSprop")), FUSED) == (
        "RMSprop has no fused form: torch has one for Adam, AdamW, SGD, Adagrad. Leave its flags as they are."
    )
    whole = made(dense)
    whole.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)]})
    assert "AdamW cannot be fused here: " in refusal(whole, FUSED)


def test_options_are_only_what_would_change_something() -> None:
    assert set(options_of(LEVER, mostly_parameters(foreach=True))) == {"parameter by parameter", "fused", "step inside backward"}
    assert set(options_of(LEVER, mostly_parameters())) == {"fused", "step inside backward"}
    assert set(options_of(LEVER, mostly_parameters(fused=True))) == {"step inside backward"}
    assert set(options_of(LEVER, in_place_ops)) == set()
    assert set(options_of(LEVER, mostly_parameters("Adafactor"))) == set()


def test_gradients_are_gone_from_the_peak() -> None:
    before = simulated(made(mostly_parameters("SGD", (64, 64, 64, 64, 64))))
    after = LEVER.rewrite(before, IN_BACKWARD)
    assert after.by_category["gradients"] < 0.6 * before.by_category["gradients"]
    assert sum(after.by_category.values()) == after.peak_bytes
