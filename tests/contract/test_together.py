"""Levers on one step at the same time, really run: in pairs, put on in both orders, and all together."""

from __future__ import annotations

from itertools import combinations

import pytest

from contract_zoo import ZOO, applicable, is_as_before, judged, levers, options, reference, step_of
from lever_law import furniture
from memfit.planner.combining import ORDER
from memfit.records import Option
from small_levers import WRONG

# Pairs that refuse each other by a message, not by `excludes`: another model is built before anything is put on it.
ONE_WAY = {"architecture"}


def join(name: str, a: Option, b: Option) -> bool:
    """Whether the planner would put them together."""
    out = [{*levers(name)[o.lever].excludes, *o.settings.get("excludes", ())} for o in (a, b)]
    return b.lever not in out[0] and a.lever not in out[1]


def pairs(name: str) -> list[tuple[Option, Option]]:
    """In both orders, with the option of each lever that changes most."""
    chosen = [options(name, lever)[-1] for lever in applicable(name)]
    found = [pair for pair in combinations(chosen, 2) if join(name, *pair)]
    return [*found, *(pair[::-1] for pair in found)]


def run_together(name: str, chosen: list[Option]) -> None:
    """Put on, run and judged by the loosest class, and taken off: everything as before."""
    step = reference(name).step
    before = furniture(step)
    found = judged(name, chosen)
    told = [option.name for option in chosen], [check for check in found.checks if not check.holds]
    assert found.same == (found.exactness != "altered") and not found.run.outcome.failure, told
    assert furniture(step) == before, told


@pytest.mark.parametrize("name", ZOO)
def test_pairs_train_the_same(name: str) -> None:
    for first, second in pairs(name):
        if second.lever in ONE_WAY:
            run = judged(name, [first, second]).run
            assert run.outcome.refused and "put this lever on first" in run.outcome.failure
        else:
            run_together(name, [first, second])


@pytest.mark.parametrize("name", ZOO)
def test_pairs_leave_everything_as_before(name: str) -> None:
    """Taken off in the order they were put on as well as backwards."""
    for chosen in pairs(name):
        for backwards in (True, False) if chosen[1].lever not in ONE_WAY else ():
            step = step_of(name)
            before = furniture(step)
            undos = [levers(name)[option.lever].apply(step, option) for option in chosen]
            for undo in undos[::-1] if backwards else undos:
                undo()
            assert is_as_before(name, step, before), (chosen, backwards)


@pytest.mark.parametrize("name", ZOO)
def test_all_together_train_the_same(name: str) -> None:
    """In the order a plan has them, each that joins those before it; another model only where it is asked for."""
    words = sorted(applicable(name), key=lambda word: ORDER.index(word) if word in ORDER else len(ORDER))
    for altered in {False, "architecture" in words}:
        chosen: list[Option] = []
        for word in words if altered else [w for w in words if w != "architecture"]:
            joining = [o for o in options(name, word) if all(join(name, o, other) for other in chosen)]
            chosen += joining[-1:]
        assert len(chosen) > 2
        run_together(name, chosen)


def passes(name: str, wrong: str, right: Option) -> bool:
    """Whether a lever that is wrong passes beside one that is right; either way it comes off again."""
    step = reference(name).step
    before = furniture(step)
    found = judged(name, [right, Option(wrong, wrong, WRONG[wrong].exactness)], {wrong: WRONG[wrong]})
    assert furniture(step) == before
    return found.same


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("other masks", "transformer"), ("counted twice", "residual"), ("averaged twice", "residual"), ("lost part", "frozen_decoder"),
        ("clipped parts", "frozen_decoder"), ("stale", "dense"), ("modified", "written_attention"), ("detached", "transformer"),
        ("weakened", "chunked_decoder"), ("slower", "loaded"), ("raising", "two_phases"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_caught_beside_each_of_the_others(wrong: str, name: str) -> None:
    for right in (options(name, lever)[-1] for lever in applicable(name)):
        splits = "part" in wrong and (right.lever == "microbatch" or "microbatch" in right.settings.get("excludes", ()))
        drowned = right.exactness == "rounded" and wrong in ("slower", "modified")  # in what rounding does
        if not splits and not drowned:
            assert not passes(name, wrong, right), right.lever
