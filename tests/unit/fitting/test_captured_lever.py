"""Levers that bring operators of their own: tried before they are weighed, so that a table made on top of them finds what it names."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memfit
from memfit import Step
from memfit.fitting.applying import apply_levers
from memfit.fitting.captured_lever import with_captured
from memfit.fitting.plan_rows import rows_of
from memfit.fitting.planning import find_plan
from memfit.fitting.timed_ledgers import seen_with_times
from memfit.levers import LEVERS, Lever
from memfit.levers.saved import table_option
from memfit.levers.saved.line import line_of
from memfit.planner.away import away_from
from memfit.planner.costs import seconds_of
from memfit.planner.search import Search
from memfit.records import Speeds


def encoder(dropout: float) -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 96, 32))


def captured(step: Step) -> tuple[memfit.Ledger, dict[str, Lever]]:
    plain = seen_with_times(step)
    return plain, with_captured({"attention": LEVERS["attention"]}, step, plain, seen_with_times, "reordered")


def test_what_is_offered_is_what_a_capture_saw() -> None:
    step = encoder(0.1)
    plain, levers = captured(step)
    (option,) = levers["attention"].options(plain)
    told = levers["attention"].rewrite(plain, option)
    with levers["attention"].apply(step, option):
        assert memfit.profile(step, simulate=True).peak_bytes == told.peak_bytes < plain.peak_bytes
        real = memfit.profile(step)
    assert real.peak_bytes == told.peak_bytes
    kernels = [op for op in told.trace.ops if op.parts]
    assert kernels and all(op.parts == 8 for op in kernels)  # simulated once, and counted as often as they run
    assert not any(op.parts for op in plain.trace.ops) and all(op.parts == 1 for op in real.trace.ops if op.parts)
    assert len(real.trace.ops) > 2 * len(told.trace.ops)


def test_a_table_on_top_finds_every_operator_it_names() -> None:
    step = encoder(0.1)
    plain, levers = captured(step)
    (option,) = levers["attention"].options(plain)
    ledger = levers["attention"].rewrite(plain, option)
    search = Search(line_of(ledger.trace), seconds_of(ledger.trace, Speeds()), Speeds(), away_from("cpu"))
    table = search.fastest(int(0.6 * ledger.peak_bytes))
    assert table is not None and table.ops
    rows = rows_of([option, table_option(ledger.trace, table.ops, "a table")])
    with warnings.catch_warnings(), apply_levers(step, rows):
        warnings.simplefilter("error")  # "this step differs from the one that was planned"
        found = memfit.profile(step, simulate=True).peak_bytes
        assert memfit.profile(step).peak_bytes == found < 0.65 * ledger.peak_bytes


def test_nothing_is_offered_where_it_does_not_apply_or_does_not_help() -> None:
    net = nn.Linear(8, 8)
    step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 8))
    plain, levers = captured(step)
    assert levers["attention"].options(plain) == []


class Written(nn.Module):
    """Attention that nobody described."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_an_attention_without_an_adapter_is_not_offered() -> None:
    net = nn.Sequential(nn.Linear(16, 16), Written())
    step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 128, 16))
    plain, levers = captured(step)
    assert LEVERS["attention"].options(plain) and levers["attention"].options(plain) == []


def test_half_precision_costs_what_its_operators_take_here() -> None:
    step = encoder(0.0)
    plain = seen_with_times(step)
    levers = with_captured(LEVERS, step, plain, seen_with_times, "rounded")
    (option,) = levers["precision"].options(plain)
    told = levers["precision"].rewrite(plain, option)
    assert any(storage.dtype == "bfloat16" for storage in told.trace.storages) and told.step_seconds != plain.step_seconds
    with levers["precision"].apply(step, option):
        assert memfit.profile(step, simulate=True).peak_bytes == told.peak_bytes
    # on paper, after another lever, it is as much dearer as the capture was
    other = memfit.levers.LEVERS["optimizer"]
    after = levers["precision"].rewrite(other.rewrite(plain, other.options(plain)[0]), option)
    on_paper = LEVERS["precision"].rewrite(other.rewrite(plain, other.options(plain)[0]), option)
    assert after.peak_bytes == on_paper.peak_bytes
    ratio = told.step_seconds / LEVERS["precision"].rewrite(plain, option).step_seconds
    assert after.step_seconds == pytest.approx(ratio * on_paper.step_seconds)


def test_what_is_not_allowed_is_not_captured() -> None:
    step = encoder(0.0)
    plain = seen_with_times(step)
    assert with_captured(LEVERS, step, plain, seen_with_times, "reordered")["precision"] is LEVERS["precision"]
    assert with_captured(LEVERS, step, plain, seen_with_times, "bitwise") == LEVERS


def wide() -> Step:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4096, 256))


@pytest.mark.parametrize(("times_slower", "weighed"), [(8.0, False), (0.5, True)])
def test_half_precision_is_left_out_where_it_is_emulated_and_something_cheap_does_it(
    monkeypatch: pytest.MonkeyPatch, times_slower: float, weighed: bool
) -> None:
    monkeypatch.setattr("memfit.fitting.planning.times_slower_in_half", lambda: times_slower)
    step = wide()
    plain = memfit.profile(step, simulate=True)
    plan = memfit.plan(step, plain.process_high_bytes - plain.peak_bytes // 4, allow="rounded")
    said = [other.rejected_because for other in plan.alternatives if other.rejected_because.startswith("not weighed")]
    why = "not weighed: this processor takes 8 times as long for a convolution in bfloat16 as in float32"
    assert said == ([] if weighed else [why])
    reordered, rounded = plan.reachable_bytes["reordered"], plan.reachable_bytes["rounded"]
    assert (rounded is not None) == weighed and reordered is not None and reordered < plain.process_high_bytes


def test_emulated_half_precision_is_weighed_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.fitting.planning.times_slower_in_half", lambda: 8.0)
    step = wide()
    plain = memfit.profile(step, simulate=True)
    found = find_plan(step, plain.process_high_bytes - plain.peak_bytes // 8, allow="rounded", levers={"precision": LEVERS["precision"]})
    assert [(lever.name, lever.settings["dtype"]) for lever in found.plan.levers] == [("precision", "bfloat16")]
    tried = {(op.bfloat16_workspace is not None, op.float16_workspace is not None) for op in found.plain.trace.ops}
    assert tried == {(False, False), (True, False)}  # float16 would take minutes, and as much memory
