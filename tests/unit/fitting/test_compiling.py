"""compile in a plan: only what was measured and proven, alone, and weighed against the length of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from lever_law import differences, furniture, made, simulated, state_after
from memfit import MemfitError, Step
from memfit.capture.unwatched import run_unwatched
from memfit.fitting.compiling import measured_compile, while_it_helps
from memfit.levers import LEVERS, Undo
from memfit.levers.compile import CompileLever, compiler_found
from memfit.planner.combining import combinations
from memfit.planner.proposing import Proposer
from memfit.records import Option, Speeds
from small_levers import WRONG
from small_steps import dense

MIB = 2**20
needs_a_compiler = pytest.mark.skipif(not compiler_found("cpu"), reason="no C++ compiler here: torch.compile cannot be tried")


class Wide(nn.Module):
    """Elementwise steps that eager mode keeps one by one and a compiler fuses into one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(x * self.weight) + torch.sigmoid(x)
        return x


def elementwise(rows: int = 512) -> Step:
    net = Wide()
    return Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(rows, 1024))


def option(**settings: float) -> Option:
    known = {"measured_peak_bytes": 4 * MIB, "measured_seconds": 1.0, "measured_slowdown": 0.9}
    return Option("compile", "the whole model", "reordered", {"modules": [""], "budget": 1.0} | known | settings)


def test_an_unwatched_peak_is_the_profiled_one() -> None:
    step = made(elementwise)
    assert run_unwatched(step).peak_bytes == pytest.approx(memfit.profile(step).peak_bytes, rel=0.01)


def with_dropout() -> Step:
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(32, 64))


def gradients_of(step: Step) -> list[torch.Tensor]:
    torch.manual_seed(1)
    step.model.zero_grad()
    step.differentiate(step.all_phases[0], step.batch, {}, None)
    return [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


@needs_a_compiler
@pytest.mark.parametrize("as_eager", [True, False])
def test_compiled_dropout_draws_what_the_plain_step_draws_and_by_itself_would_not(as_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    step = made(with_dropout)
    plain = gradients_of(step)
    if not as_eager:
        monkeypatch.setattr("memfit.levers.compile._DRAWING_AS_EAGER", {})
    with CompileLever().apply(step, CompileLever().candidates(simulated(step))[0]):
        compiled = gradients_of(step)
    same = [torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(plain, compiled, strict=True)]
    assert all(same) == as_eager


@needs_a_compiler
def test_what_does_not_compile_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise ValueError("inductor is out of order")

    torch._dynamo.reset()
    monkeypatch.setattr("memfit.levers.compile.compiler", lambda: broken)
    step, said = made(with_dropout), list[str]()
    before = furniture(step)
    assert not measured_compile(step, run_steps=100, progress=said.append).options(simulated(step))
    assert any("the whole model does not compile" in words and "is out of order" in words for words in said)
    assert furniture(step) == before


@pytest.mark.parametrize(
    ("peaks", "tried"),
    [((9, 5, 3, 2), 4), ((9, 5, 7, 2), 3), ((9, 9, 3, 2), 2), ((9, 5, None, 2), 3), ((None, 5, 3, 2), 1)],
)
def test_lower_budgets_are_tried_while_they_help(peaks: tuple[int | None, ...], tried: int) -> None:
    asked = list[float]()

    def found(candidate: Option) -> Option | None:
        asked.append(candidate.settings["budget"])
        peak = peaks[len(asked) - 1]
        return None if peak is None else replace(candidate, settings=candidate.settings | {"measured_peak_bytes": peak})

    family = [option(budget=budget) for budget in (1.0, 0.5, 0.2, 0.05)]
    passed = list(while_it_helps(family, found))
    assert asked == [1.0, 0.5, 0.2, 0.05][:tried]
    assert [o.settings["measured_peak_bytes"] for o in passed] == [peak for peak in peaks[:tried] if peak is not None]


def test_nothing_unmeasured_is_ever_weighed() -> None:
    ledger = simulated(made(dense))
    assert not [c for c in combinations(ledger, LEVERS, "altered") if any(o.lever == "compile" for o in c.options)]


def test_it_stands_alone_and_its_seconds_are_weighed() -> None:
    ledger = simulated(made(elementwise))

    def proposed(slowdown: float) -> list[tuple[str, ...]]:
        lever = CompileLever([option(measured_slowdown=slowdown, measured_peak_bytes=ledger.peak_bytes // 2)])
        proposer = Proposer(ledger, LEVERS | {"compile": lever}, "reordered", Speeds())
        found = proposer.propose(lambda _: int(0.8 * ledger.peak_bytes), 1.0).fitting
        return [tuple(o.lever for o in p.combination.options) + (("saved",) if p.table.ops else ()) for p in found]

    fast, slow = proposed(0.5), proposed(50.0)
    assert fast[0] == ("compile",) and not [words for words in fast if "compile" in words and len(words) > 1]
    assert slow[0] != ("compile",)  # a compiler's seconds spread over too short a run


def test_a_run_of_no_steps_is_refused() -> None:
    with pytest.raises(MemfitError) as caught:
        measured_compile(made(dense), run_steps=0)
    assert str(caught.value) == "A training of 0 steps has nothing to compile for: give the number of steps it will have."


@needs_a_compiler
def test_end_to_end() -> None:
    step = made(lambda: elementwise(4096))
    before, state = furniture(step), state_after(made(lambda: elementwise(4096)), 1)
    lever = measured_compile(step, run_steps=10**6)
    assert furniture(step) == before
    ledger = simulated(step)
    whole = lever.options(ledger)[0]
    settings = whole.settings
    assert settings["measured_peak_bytes"] < 0.9 * ledger.peak_bytes and settings["compile_seconds"] > 0
    assert "compiling takes" in whole.why and "proven the same" in whole.why

    as_fast = CompileLever([replace(whole, settings=settings | {"measured_slowdown": 0.5})])  # timing is no matter of a test
    budget = (ledger.process_high_bytes + as_fast.rewrite(ledger, as_fast.options(ledger)[0]).process_high_bytes) // 2
    fitted = memfit.fit(step, budget, levers={"compile": as_fast})
    assert [row.name for row in fitted.plan.levers] == ["compile"] and fitted.verdict.equivalent
    assert fitted.plan.predicted_peak_bytes == fitted.ledger.peak_bytes == settings["measured_peak_bytes"]
    fitted.undo()
    assert furniture(step) == before and differences(state, state_after(step, 1)) == []


@needs_a_compiler
def test_what_is_not_the_same_training_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that gives wrong gradients without a word, as one did with dropout under a budget."""
    right = CompileLever.apply

    def wrong(self: CompileLever, step: Step, chosen: Option) -> Undo:
        undo = right(self, step, chosen)
        WRONG["weakened"].act(step, undo)
        return undo

    monkeypatch.setattr(CompileLever, "apply", wrong)
    assert measured_compile(made(elementwise), run_steps=1).options(simulated(made(elementwise))) == ()
