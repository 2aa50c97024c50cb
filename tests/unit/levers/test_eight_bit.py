from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from lever_law import differences, furniture, made, simulated, state_after
from memfit import MemfitError, Step
from memfit.levers import LEVERS, CannotApply
from memfit.levers.eight_bit import is_installed, refuse_to_load
from memfit.records import Option

LEVER = LEVERS["optimizer"]
EIGHT = Option("optimizer", "states in eight bits", "rounded", {"how": "eight bits"})
installed = pytest.mark.skipif(not is_installed(), reason="bitsandbytes is an extra")


def layers() -> Step:
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return Step(net, lambda m, x: m(x).pow(2).mean(), optimizer, torch.randn(4, 128), scheduler=scheduler)


@installed
def test_the_law_against_a_real_run() -> None:
    """Not against a simulation, which does not see what an op of another library takes inside."""
    before = simulated(made(layers))
    assert "states in eight bits" in [o.name for o in LEVER.options(before)]
    step = made(layers)
    LEVER.apply(step, EIGHT)
    assert LEVER.rewrite(before, EIGHT).peak_bytes == pytest.approx(memfit.profile(step).peak_bytes, rel=0.02)
    assert before.peak_bytes != pytest.approx(memfit.profile(step).peak_bytes, rel=0.02)


@installed
@pytest.mark.filterwarnings("error::UserWarning")
def test_it_is_rounded_and_no_more() -> None:
    step, plain = made(layers), made(layers)
    LEVER.apply(step, EIGHT)
    state_after(step), state_after(plain)
    weights = [torch.cat([p.flatten() for p in s.model.parameters()]) for s in (step, plain)]  # type: ignore[union-attr]
    start = torch.cat([p.flatten() for p in made(layers).model.parameters()])  # type: ignore[union-attr]
    moved = (weights[1] - start).norm()
    assert 0 < (weights[0] - weights[1]).norm() < 0.1 * moved
    assert step.optimizers[0].param_groups[0]["lr"] == plain.optimizers[0].param_groups[0]["lr"] == 0.01 / 8


@installed
def test_undo_restores_and_training_goes_on() -> None:
    step = made(layers)
    before = furniture(step)
    undo = LEVER.apply(step, EIGHT)
    step.run(step.batch, schedule=False)
    undo()
    assert furniture(step) == before
    step.run(step.batch)
    state = next(iter(step.optimizers[0].state.values()))
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 2 and state["exp_avg"].dtype == torch.float32


@installed
def test_refusals_say_why() -> None:
    ran = made(layers)
    ran.run(ran.batch)
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(ran, EIGHT)
    assert str(caught.value) == (
        "AdamW cannot keep its states in eight bits; it has states in full already: ask for it before the first step."
    )
    assert differences(state_after(ran), state_after(ran))  # and it still trains


@pytest.mark.skipif(is_installed(), reason="bitsandbytes is here")
def test_without_bitsandbytes_it_is_not_offered_and_refused() -> None:
    assert "states in eight bits" not in [o.name for o in LEVER.options(simulated(made(layers)))]
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(made(layers), EIGHT)
    assert str(caught.value) == (
        "AdamW cannot keep its states in eight bits; bitsandbytes is not installed: pip install bitsandbytes, or leave this option out."
    )


def test_loading_a_state_is_refused_with_the_reason() -> None:
    step = made(layers)
    step.optimizers[0].register_load_state_dict_pre_hook(refuse_to_load)
    with pytest.raises(MemfitError, match="AdamW keeps its states in eight bits here, and torch cannot load them: take the lever off"):
        step.optimizers[0].load_state_dict(step.optimizers[0].state_dict())


@installed
def test_with_the_lever_on_and_not_after_it() -> None:
    step = made(layers)
    saved = step.optimizers[0].state_dict()
    with LEVER.apply(step, EIGHT), pytest.raises(MemfitError):
        step.optimizers[0].load_state_dict(saved)
    step.optimizers[0].load_state_dict(saved)
