from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from lever_law import furniture, made, simulated, state_after
from memfit import MemfitError, Step
from memfit.levers import CannotApply
from memfit.levers.compile import CompileLever, compile_seconds, compiler_found
from memfit.levers.settings import damage_in
from memfit.records import Option
from small_steps import transformer

LEVER = CompileLever()
WHOLE = Option("compile", "the whole model", "reordered", {"modules": [""], "budget": 0.5})


def blocks() -> Step:
    net = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Sequential(nn.Linear(16, 16), nn.GELU()))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(8, 16))


@pytest.mark.skipif(not compiler_found("cpu"), reason="no compiler here: the refusal is tested instead")
def test_the_same_training_within_reordering_and_undo() -> None:
    step = made(blocks)
    before = furniture(step)
    undo = LEVER.apply(step, WHOLE)
    assert compile_seconds(step) == 0
    budget = functorch_config.activation_memory_budget  # type: ignore[attr-defined]
    changed, plain = state_after(step), state_after(made(blocks))
    assert functorch_config.activation_memory_budget == budget  # type: ignore[attr-defined]
    assert set(changed) == set(plain)
    for name, value in plain.items():
        torch.testing.assert_close(changed[name], value, rtol=1e-4, atol=1e-6)
    assert compile_seconds(step) > 0
    assert str(inspect.signature(step.model.forward)) == str(inspect.signature(nn.Sequential().forward))  # type: ignore[union-attr]
    undo()
    assert furniture(step) == before


@pytest.mark.skipif(not compiler_found("cpu"), reason="no compiler here")
def test_steps_share_what_is_compiled_but_budgets_do_not() -> None:
    def graphs(budget: float) -> int:
        step = made(blocks)
        with LEVER.apply(step, Option("compile", "", "reordered", {"modules": ["0", "1"], "budget": budget})):
            before = counters["stats"]["unique_graphs"]
            step.run(step.batch)
            return int(counters["stats"]["unique_graphs"] - before)

    torch._dynamo.reset()
    assert [graphs(1.0), graphs(1.0), graphs(0.5)] == [2, 0, 2]  # the first block's input needs no gradient, the second's does


def test_what_could_be_tried_are_whole_models_and_repeated_blocks() -> None:
    options = {option.name: option for option in LEVER.candidates(simulated(made(blocks)))}
    budgets = ("", ", budget 0.5", ", budget 0.2", ", budget 0.05")
    assert list(options) == [words + budget for words in ("the whole model", "each of 2 blocks") for budget in budgets]
    assert options["each of 2 blocks"].settings["modules"] == ["0", "1"]
    assert all(o.exactness == "reordered" for o in options.values())


def test_an_option_counts_only_when_it_was_measured() -> None:
    before = simulated(made(transformer))
    assert LEVER.options(before) == ()
    with pytest.raises(MemfitError) as caught:
        LEVER.rewrite(before, WHOLE)
    assert str(caught.value) == (
        "What 'the whole model' takes is not known yet: a compiler's memory cannot be predicted. Let "
        "memfit.fitting.compiling.measured_compile run it, and plan with the lever it gives."
    )
    measured = {"measured_peak_bytes": before.peak_bytes - 1000, "measured_seconds": 0.25}
    after = LEVER.rewrite(before, Option("compile", "", "reordered", {**WHOLE.settings, **measured}))
    assert (after.peak_bytes, after.step_seconds) == (before.peak_bytes - 1000, 0.25)
    assert sum(after.by_category.values()) == after.peak_bytes
    assert after.by_category["parameters"] == before.by_category["parameters"]


def test_without_a_compiler_it_is_not_offered_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert LEVER.candidates(simulated(made(blocks))) == ()
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(made(blocks), WHOLE)
    assert str(caught.value) == "torch.compile needs a C++ compiler, and none was found: install one."


@pytest.mark.skipif(not compiler_found("cpu"), reason="no compiler here")
def test_a_module_that_is_not_there_is_refused() -> None:
    step = made(blocks)
    before = furniture(step)
    with pytest.raises(CannotApply, match=r"no module 'layers\.7' to compile"):
        LEVER.apply(step, Option("compile", "", "reordered", {"modules": ["0", "layers.7"], "budget": 1.0}))
    assert furniture(step) == before


def test_in_parts_where_no_draw_has_to_be_replayed() -> None:
    def dropped() -> Step:
        step = blocks()
        step.model.append(nn.Dropout(0.5))  # type: ignore[union-attr]
        return step

    def normed() -> Step:
        step = blocks()
        step.model.append(nn.BatchNorm1d(16))  # type: ignore[union-attr]
        return step

    named = {make.__name__: [o.name for o in LEVER.in_parts(WHOLE, simulated(made(make)))] for make in (blocks, dropped, normed)}
    assert named == {
        "blocks": ["the whole model, 2 micro-batches of 4", "the whole model, 4 micro-batches of 2"],
        "dropped": [],  # under the mode that replays draws, compiled code would not run
        "normed": [],
    }


@pytest.mark.skipif(not compiler_found("cpu"), reason="no compiler here")
def test_compiled_parts_give_the_whole_batchs_gradient_and_undo_both() -> None:
    torch._dynamo.reset()
    step = made(blocks)
    before = furniture(step)
    (halves, _quarters) = LEVER.in_parts(WHOLE, simulated(step))
    with LEVER.apply(step, halves):
        assert step.running.split is not None
        changed, plain = state_after(step), state_after(made(blocks))
        assert compile_seconds(step) > 0
    for name, value in plain.items():
        torch.testing.assert_close(changed[name], value, rtol=1e-4, atol=1e-6)
    assert furniture(step) == before and step.running.split is None


def test_damaged_settings_of_parts_are_told() -> None:
    (halves, _quarters) = LEVER.in_parts(WHOLE, simulated(made(blocks)))
    assert damage_in("compile", halves.settings) == ""
    halves.settings["split"].pop("size")
    assert "of its micro-batches 'size' is missing" in damage_in("compile", halves.settings)
