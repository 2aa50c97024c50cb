"""Every lever on every small step it applies to: what it promises is captured, what it changes is changed back, alone and in pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import pytest

from lever_law import differences, furniture, made, simulated, state_after
from memfit import Ledger, Step
from memfit.errors import MemfitError
from memfit.levers import LEVERS, CannotApply, Undo
from memfit.records import Option
from quick_ledgers import seen
from saved_steps import STEPS

ZOO = (
    "dense", "convolutional_2d", "convolutional_3d", "transformer", "frozen_decoder", "two_phases", "mixed_precision", "in_place_ops",
    "residual", "frozen_convolutions",
)  # fmt: skip
UNPREDICTED = {"compile"}  # its rewrite asks for a measurement first; its own tests apply it
# Their peak lies in an operator's workspace, or is where it is because of one: the law is asked of whole profiles.
WITH_WORKSPACES = {
    ("dense", "optimizer"), ("convolutional_2d", "optimizer"), ("convolutional_3d", "microbatch"), ("frozen_convolutions", "microbatch"),
}  # fmt: skip
# Known to be beyond 2 %: autocast on steps of few and small tensors (4.5 to 12 %), "every block made again" on a tiny transformer (2.2 %).
OFF = {
    ("convolutional_2d", "precision"), ("frozen_decoder", "precision"), ("two_phases", "precision"), ("in_place_ops", "precision"),
    ("transformer", "saved"),
}  # fmt: skip


@cache
def ledger(name: str) -> Ledger:
    return seen(made(STEPS[name]))


@cache
def options(name: str, lever: str) -> tuple[Option, ...]:
    return tuple(LEVERS[lever].options(ledger(name)))[:3]


@cache
def plain_state(name: str) -> dict[str, object]:
    return state_after(made(STEPS[name]), 1)  # type: ignore[return-value]


def applicable(name: str) -> list[str]:
    return [lever for lever in LEVERS if lever not in UNPREDICTED and options(name, lever)]


def is_as_before(name: str, step: Step, before: list[object]) -> bool:
    return furniture(step) == before and differences(plain_state(name), state_after(step, 1)) == []  # type: ignore[arg-type]


def errors(name: str, lever: str, look: Callable[[Step], Ledger] = seen) -> list[float]:
    """For each option, how far the rewritten peak is from the captured one."""
    before = ledger(name) if look is seen else look(made(STEPS[name]))
    found = []
    for option in options(name, lever):
        step = made(STEPS[name])
        with LEVERS[lever].apply(step, option):
            found.append(abs(LEVERS[lever].rewrite(before, option).peak_bytes / look(step).peak_bytes - 1))
    return found


@pytest.mark.parametrize("name", ZOO)
def test_the_law(name: str) -> None:
    for lever in applicable(name):
        if (name, lever) not in OFF | WITH_WORKSPACES:
            assert max(errors(name, lever)) < 0.02, lever


@pytest.mark.parametrize("pair", sorted(WITH_WORKSPACES), ids=" ".join)
def test_the_law_of_whole_profiles(pair: tuple[str, str]) -> None:
    assert max(errors(*pair, simulated)) < 0.02


@pytest.mark.parametrize("pair", sorted(OFF), ids=" ".join)
def test_what_is_left_out_is_really_off(pair: tuple[str, str]) -> None:
    """So that the list above shrinks when a lever gets better."""
    assert max(errors(*pair)) >= 0.02, f"{pair[1]} holds the law on {pair[0]} now: take it off the list"


@pytest.mark.parametrize("name", ZOO)
def test_undo_restores(name: str) -> None:
    for lever in applicable(name):
        for option in options(name, lever):
            step = made(STEPS[name])
            before = furniture(step)
            LEVERS[lever].apply(step, option)()
            assert is_as_before(name, step, before), (lever, option.name)


def put_on(step: Step, chosen: list[Option]) -> list[Undo] | None:
    """All of them, or none where they exclude each other or one cannot act."""
    undos: list[Undo] = []
    try:
        for option in chosen:
            undos.append(LEVERS[option.lever].apply(step, option))
    except (CannotApply, MemfitError):
        for undo in reversed(undos):
            undo()
        return None
    return undos


def join(a: Option, b: Option) -> bool:
    out = {*LEVERS[a.lever].excludes, *a.settings.get("excludes", ())}, {*LEVERS[b.lever].excludes, *b.settings.get("excludes", ())}
    return b.lever not in out[0] and a.lever not in out[1]


@pytest.mark.parametrize("name", ZOO)
def test_pairs_leave_everything_as_before(name: str) -> None:
    """Put on in both orders, taken off in both orders; where a pair cannot be put on, what was put on first comes off."""
    for first, second in combinations(applicable(name), 2):
        pair = [options(name, first)[-1], options(name, second)[-1]]
        for chosen in (pair, pair[::-1]) if join(*pair) else ():
            for backwards in (True, False):
                step = made(STEPS[name])
                before = furniture(step)
                for undo in (put_on(step, chosen) or [])[:: -1 if backwards else 1]:
                    undo()
                assert is_as_before(name, step, before), (first, second, backwards)


@pytest.mark.parametrize("lever", [lever for lever in LEVERS if lever not in UNPREDICTED])
def test_an_undo_that_forgets_would_be_noticed(lever: str) -> None:
    name = next((name for name in ZOO if options(name, lever)), None)
    if name is None:
        pytest.skip(f"{lever} has no option on the small steps; its own tests apply it")
    step = made(STEPS[name])
    before = furniture(step)
    kept = LEVERS[lever].apply(step, options(name, lever)[-1])
    if lever == "allocator":
        kept()
        pytest.skip("changes the process, not the step: see its own tests")
    assert not is_as_before(name, step, before)
    kept()
