"""A step that leaves memory behind each time: nobody says that it fits without saying for how many steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit import Plan, Step
from memfit.fitting.checking import why_it_fits
from memfit.fitting.given_plan import given
from memfit.fitting.trial import try_out
from memfit.growth import steps_inside
from memfit.records import Ledger
from memfit.report.plan_view import plan_view

MIB = 2**20
LEAK = 4 * MIB


def leaking() -> Step:
    kept: list[torch.Tensor] = []
    net = nn.Linear(8, 8)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros(LEAK // 4))
        return model(x).pow(2).mean()

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return memfit.profile(leaking(), simulate=True)


def test_a_check_says_for_how_many_steps(ledger: Ledger) -> None:
    budget = ledger.process_high_bytes + 10 * LEAK + 1
    fits, reason = why_it_fits(ledger, budget)
    assert ledger.growth_bytes == LEAK and steps_inside(ledger, budget) == 11 and not fits
    assert " for 11 steps only: the process is predicted" in reason
    assert reason.endswith("every step leaves 4.00 MiB behind that nothing frees (memfit profile names the line).")


def test_what_a_training_of_a_million_steps_has_room_for_fits(ledger: Ledger) -> None:
    drop = replace(ledger, growth_bytes=4)
    fits, reason = why_it_fits(drop, ledger.process_high_bytes + 8 * MIB)
    assert fits and " for 2,097,153 steps: " in reason and "every step leaves 4 B behind" in reason
    assert why_it_fits(drop, ledger.process_high_bytes - 1)[1].startswith("It does not fit")
    fits, reason = why_it_fits(replace(ledger, growth_bytes=0), ledger.process_high_bytes)
    assert fits and "steps" not in reason and "leaves" not in reason


def test_a_plan_says_for_how_many_steps_also_one_from_a_file() -> None:
    step, budget = leaking(), 16 * 2**30
    plan = memfit.plan(step, budget)
    assert plan.growth_bytes == LEAK and 3000 < (plan.fits_steps or 0) < 4096
    assert plan_view(plan).answer == f"It fits for {plan.fits_steps:,} steps as it is: nothing has to be changed."
    assert any(name == "Growth" and amount == "4.00 MiB" for amount, name, _ in plan_view(plan).figures)
    older = Plan.from_dict({key: value for key, value in plan.to_dict().items() if key not in ("growth_bytes", "fits_steps")})
    assert older.fits_steps is None and (given(older, step, budget // 2).plan.fits_steps or 0) < 2048


def test_a_plan_with_techniques_says_so_too() -> None:
    plan = Plan(True, 2**30, 1, 1, 1.0, "bitwise", (), growth_bytes=LEAK, fits_steps=1)
    assert plan_view(plan).answer.startswith("It fits for 1 step as it is")
    assert plan_view(replace(plan, growth_bytes=0, fits_steps=None)).answer.startswith("It fits as it is")


def test_a_fitted_run_says_what_a_longer_one_would_meet() -> None:
    fitted = memfit.fit(leaking(), "16GiB")
    said = try_out(fitted, 2).to_dict()
    assert said["growth_bytes"] == LEAK and 3000 < said["fits_steps"] < 4096
