from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn

from lever_law import differences, made, simulated, state_after
from memfit import MemfitError, Step, StepError
from memfit.fitting.applying import apply_levers
from memfit.levers import LEVERS, CannotApply
from memfit.levers.architecture import ArchitectureLever
from memfit.records import Option, PlannedLever


def of_width(width: int, **more: object) -> Step:
    net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(8, 16), **more)  # type: ignore[arg-type]


def with_variants() -> Step:
    return of_width(128, variants={"a quarter": lambda: of_width(32), "half": lambda: of_width(64), "double": lambda: of_width(256)})


def sized(step: Step) -> ArchitectureLever:
    return ArchitectureLever({name: simulated(build()) for name, build in step.variants.items()})


def test_options_are_the_smaller_variants_least_altered_first() -> None:
    step = made(with_variants)
    options = sized(step).options(simulated(step))
    assert [(o.name, o.exactness) for o in options] == [("half", "altered"), ("a quarter", "altered")]
    assert LEVERS["architecture"].options(simulated(step)) == ()  # nothing was sized


def test_the_law_and_the_step_people_hold() -> None:
    step = made(with_variants)
    lever, before = sized(step), simulated(step)
    for option in lever.options(before):
        with lever.apply(step, option):
            assert simulated(step).peak_bytes == lever.rewrite(before, option).peak_bytes < before.peak_bytes
    assert simulated(step).peak_bytes == before.peak_bytes


def test_it_trains_the_variant_and_undo_brings_the_old_one_back() -> None:
    step = made(with_variants)
    before = {f.name: getattr(step, f.name) for f in fields(step)}
    torch.manual_seed(7)
    undo = ArchitectureLever().apply(step, Option("architecture", "half", "altered", {"variant": "half"}))
    assert differences(state_after(made(lambda: of_width(64), 7)), state_after(step)) == []
    undo()
    assert all(getattr(step, name) is value for name, value in before.items())
    assert differences(state_after(made(with_variants)), state_after(step)) == []


def test_the_training_is_another() -> None:
    """Seen, so that the class is not an excuse."""
    step = made(with_variants)
    ArchitectureLever().apply(step, Option("architecture", "half", "altered", {"variant": "half"}))
    assert differences(state_after(made(with_variants)), state_after(step))


def test_levers_that_the_program_puts_on_step_and_variant_alike_are_the_variants_own() -> None:
    """Mixed precision, as a program switches it on: its guard watches the model that is trained."""

    def halved(width: int, **more: object) -> Step:
        step = of_width(width, **more)
        apply_levers(step, [PlannedLever("precision", "bfloat16 autocast", "rounded", settings={"dtype": "bfloat16"})])
        return step

    step = made(lambda: halved(128, variants={"half": lambda: halved(64), "full precision": lambda: of_width(64)}))
    before = step.running
    lever = sized(step)
    option, _ = sorted(lever.options(simulated(step)), key=lambda option: option.name != "half")
    with lever.apply(step, option):
        assert step.running.guard is not None and step.running is not before
        assert simulated(step).peak_bytes == lever.rewrite(simulated(step), option).peak_bytes
    assert step.running is before
    assert refusal(step, "full precision").startswith("'full precision' is another model, and other levers are on the present one")


def refusal(step: Step, name: str) -> str:
    with pytest.raises(CannotApply) as caught:
        ArchitectureLever().apply(step, Option("architecture", name, "altered", {"variant": name}))
    return str(caught.value)


def test_refusals_say_why() -> None:
    assert refusal(of_width(8, variants={"half": lambda: of_width(4)}), "third") == (
        "This step has no variant 'third' (it has: 'half'): give it as Step(…, variants={name: factory})."
    )
    assert refusal(of_width(8, variants={"half": lambda: 3}), "half") == (
        "The factory of variant 'half' returned a int: let it return a Step."
    )
    busy = made(with_variants)
    busy.running.after_step.append(print)
    assert refusal(busy, "half") == "'half' is another model, and other levers are on the present one: put this lever on first."
    with pytest.raises(MemfitError, match="'half' was not sized yet"):
        ArchitectureLever().rewrite(simulated(made(with_variants)), Option("architecture", "half", "altered", {"variant": "half"}))


def test_variants_must_be_functions() -> None:
    with pytest.raises(StepError, match="the variant 'half' is a int: give a function without arguments"):
        of_width(8, variants={"half": 4})
    with pytest.raises(StepError, match="variants is a list: give a dict"):
        of_width(8, variants=[1])
