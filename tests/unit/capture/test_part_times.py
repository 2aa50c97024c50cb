"""What micro-batches cost beside the whole batch, from calls of both sizes timed one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit import Step
from memfit.capture import capture, op_times
from memfit.capture.op_times import OpCalls, timed
from memfit.capture.part_times import part_costs
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.shrinking import call_for_part
from memfit.planner.costs import slower_in_parts

aten = torch.ops.aten


def meta(*size: int) -> torch.Tensor:
    return torch.empty(size, device="meta")


def sizes_of(func: Any, *args: Any) -> list[tuple[int, ...]] | None:
    part = call_for_part(Call.of(func, args, {}), 8, 2)
    return None if part is None else [shape.size for shape in part.shapes()]


def test_a_call_on_some_of_the_samples() -> None:
    convolution = (aten.convolution.default, meta(8, 3, 16, 16), meta(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert sizes_of(*convolution) == [(2, 3, 16, 16), (4, 3, 3, 3)]
    assert sizes_of(aten.mm.default, meta(8 * 100, 30), meta(30, 50)) == [(200, 30), (30, 50)]
    assert sizes_of(aten.bmm.default, meta(16, 99, 7), meta(16, 7, 99)) == [(4, 99, 7), (4, 7, 99)]
    assert sizes_of(aten.add.Tensor, meta(8, 5), meta(8, 5)) == [(2, 5), (2, 5)]
    assert sizes_of(aten.mm.default, meta(3, 5), meta(5, 7)) is None  # nothing of a batch in it


def test_a_size_between_two_that_were_timed_costs_something_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(op_times, "_GIVEN_UP", set())
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(16, 512))
    calls = OpCalls()
    trace = capture(step, True, calls=calls)
    known = timed(trace, calls, [1e-3] * len(trace.ops), lambda words: None)
    costs = part_costs(known, calls, lambda words: None)
    assert [size for size, _ in costs] == [1, 2, 4, 8]
    found = replace(known, part_costs=costs)
    assert slower_in_parts(found, 16) == 1.0 and slower_in_parts(found, 1) == costs[0][1]
    assert min(costs[1][1], costs[2][1]) <= slower_in_parts(found, 3) <= max(costs[1][1], costs[2][1])
    assert slower_in_parts(known, 1) == 1.0  # not measured


def test_a_single_sample_has_no_parts() -> None:
    net = nn.Linear(8, 8)
    step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(1, 8))
    calls = OpCalls()
    trace = capture(step, True, calls=calls)
    assert part_costs(timed(trace, calls, [1e-5] * len(trace.ops), lambda words: None), calls, lambda words: None) == ()


def test_noise_does_not_make_a_larger_part_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"1 of 8": 0.2, "2 of 8": 0.5, "4 of 8": 0.3, "8 of 8": 1.0}
    told = {word: [spent, spent] for word, spent in seconds.items()}
    monkeypatch.setattr("memfit.capture.part_times.times_of", lambda trials, progress: {k: told[k.partition(":")[0]] for k in trials})
    net = nn.Linear(8, 8)
    step = Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(8, 8))
    calls = OpCalls()
    trace = capture(step, True, calls=calls)
    known = timed(trace, calls, [1e-3] * len(trace.ops), lambda words: None)
    assert dict(part_costs(known, calls, lambda words: None)) == pytest.approx({1: 1.6, 2: 1.6, 4: 1.0})
