"""Every lever on every small step it applies to: the law, its class of exactness, and that what it changes is changed back."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from contract_zoo import MEASURED_FIRST, WHOLE_PROFILES, ZOO, applicable, is_as_before, judged, ledger, levers, options, step_of
from lever_law import furniture, simulated
from memfit import Ledger, Step
from memfit.ledger import account
from memfit.levers import LEVERS, Lever, Undo
from memfit.levers.compile import CompileLever, compiler_found
from memfit.levers.settings import damage_in
from memfit.records import Option
from quick_ledgers import seen

# Their peak lies in an operator's workspace, or is where it is because of one: the law is asked of whole profiles.
WITH_WORKSPACES = {
    ("dense", "optimizer"), ("convolutional_2d", "optimizer"), ("convolutional_3d", "microbatch"), ("frozen_convolutions", "microbatch"),
    ("outer_product_context", "optimizer"),
}  # fmt: skip


def errors(name: str, lever: str, look: Callable[[Step], Ledger] = seen) -> list[float]:
    """For each option, how far the rewritten peak is from the captured one."""
    before = ledger(name) if look is seen else look(step_of(name))
    look = simulated if name in WHOLE_PROFILES else look
    found = []
    for option in options(name, lever):
        step = step_of(name)
        with levers(name)[lever].apply(step, option):
            captured = look(step)
        told = levers(name)[lever].rewrite(before, option)
        if lever == "precision" and look is seen:  # it says what half-precision kernels take inside, which `seen` does not look at
            told = without_workspaces(told)
        found.append(abs(told.peak_bytes / captured.peak_bytes - 1))
    return found


def without_workspaces(told: Ledger) -> Ledger:
    assert told.trace is not None
    return account(replace(told.trace, ops=tuple(replace(op, workspace=0) for op in told.trace.ops)))


def test_every_lever_is_tried() -> None:
    assert {lever for name in ZOO for lever in applicable(name)} == LEVERS.keys() - MEASURED_FIRST


@pytest.mark.parametrize("name", ZOO)
def test_the_law(name: str) -> None:
    for lever in applicable(name):
        if (name, lever) not in WITH_WORKSPACES:
            assert max(errors(name, lever)) < 0.02, lever


@pytest.mark.parametrize("name", ZOO)
def test_what_a_plan_holds_for_it_is_read_back_whole(name: str) -> None:
    for lever in applicable(name):
        for option in options(name, lever):
            assert damage_in(lever, json.loads(json.dumps(option.settings))) == ""


@pytest.mark.parametrize("pair", sorted(WITH_WORKSPACES), ids=" ".join)
def test_the_law_of_whole_profiles(pair: tuple[str, str]) -> None:
    assert max(errors(*pair, simulated)) < 0.02


@pytest.mark.parametrize("name", ZOO)
def test_the_class_is_what_it_says(name: str) -> None:
    """By the rules of the proof; what is altered is never the same, and never called so."""
    for lever in applicable(name):
        for option in options(name, lever):
            found = judged(name, [option])
            assert found.same == (option.exactness != "altered"), (lever, option.name, [c for c in found.checks if not c.holds])
            assert not found.run.outcome.failure


@pytest.mark.parametrize("name", ZOO)
def test_undo_restores(name: str) -> None:
    for lever in applicable(name):
        for option in options(name, lever):
            step = step_of(name)
            before = furniture(step)
            levers(name)[lever].apply(step, option)()
            assert is_as_before(name, step, before), (lever, option.name)


@pytest.mark.parametrize("lever", [lever for lever in LEVERS if lever not in MEASURED_FIRST])
def test_an_undo_that_forgets_would_be_noticed(lever: str) -> None:
    name = next(name for name in ZOO if options(name, lever))
    step = step_of(name)
    before = furniture(step)
    with levers(name)[lever].apply(step, options(name, lever)[-1]):
        assert furniture(step) != before


@pytest.mark.parametrize("fitted_before", [True, False])
@pytest.mark.parametrize("lever", [lever for lever in LEVERS if lever not in MEASURED_FIRST])
def test_a_lever_stays_on_when_a_checkpoint_is_loaded_and_comes_off_after_it(lever: str, fitted_before: bool) -> None:
    """One that was saved with the lever on, or without it."""
    name = next(name for name in ZOO if options(name, lever))
    for option in options(name, lever):
        step, saving = step_of(name), step_of(name)
        before = furniture(step)
        with Undo() as taking_off:
            if fitted_before or lever == "architecture":  # what a model has learned is nothing for a variant of it
                taking_off.then(levers(name)[lever].apply(saving, option))
            saved = [copy.deepcopy(one.state_dict()) for one in (*saving.models.values(), *saving.optimizers)]
        undo = levers(name)[lever].apply(step, option)
        fitted = furniture(step)
        for state, one in zip(saved, (*step.models.values(), *step.optimizers), strict=True):
            one.load_state_dict(state)
        assert furniture(step) == fitted, option.name
        undo()
        assert furniture(step) == before, option.name


def _stopped(monkeypatch: pytest.MonkeyPatch, stop: Callable[[], Any], lever: Lever, step: Step, option: Option, number: int) -> bool:
    """Whether an apply was stopped right after its n-th change: False where it has fewer."""
    done, then = [0], Undo.then

    def stopping(undo: Undo, restore: Callable[..., Any], *values: Any) -> None:
        then(undo, restore, *values)
        done[0] += 1
        if done[0] == number:
            stop()

    with monkeypatch.context() as patched:
        patched.setattr(Undo, "then", stopping)
        try:
            lever.apply(step, option)()
        except (ValueError, KeyboardInterrupt):
            assert done[0] >= number
            return True
    return False


def _raise() -> None:
    raise ValueError("of an apply that fails halfway")


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stop", [_raise, _interrupt], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("lever", LEVERS)
def test_an_apply_that_fails_halfway_leaves_everything_as_it_was(
    lever: str, stop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of its first changes; what a lever does to several optimizers or modules it does in the same way."""
    name = "dense" if lever in MEASURED_FIRST else next(name for name in ZOO if options(name, lever))
    if lever in MEASURED_FIRST and not compiler_found("cpu"):
        pytest.skip("no C++ compiler here")
    known: Any = CompileLever() if lever in MEASURED_FIRST else levers(name)[lever]
    split = {"split": {"size": 1, "batch": step_of(name).batch_size, "draws": {}, "again": False}}
    for option in known.candidates(ledger(name))[:1] if lever in MEASURED_FIRST else options(name, lever):
        step = step_of(name)
        if lever in MEASURED_FIRST:
            option = Option(lever, option.name, option.exactness, option.settings | split)
        before, number = furniture(step), 1
        while _stopped(monkeypatch, stop, known, step, option, number) and number < 8:
            assert furniture(step) == before, (option.name, number)
            number += 1
        assert number > 1 and furniture(step) == before
