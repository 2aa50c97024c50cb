"""Levers that a step fails with: the plan does without them, and nobody is told that the step is at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Step
from memfit.fitting.captured_lever import with_captured
from memfit.fitting.plan_search import PlanSearch, Request
from memfit.fitting.planning import find_plan
from memfit.levers import LEVERS
from memfit.levers.saved import SavedLever, table_option
from memfit.levers.saved.line import line_of
from memfit.levers.saved.table import RECOMPUTE
from memfit.levers.undo import Undo
from memfit.records import Option
from quick_ledgers import seen


def deep(checkpointed: bool = False) -> Step:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        return out.pow(2).mean()

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(8192, 64))


class Crashing(SavedLever):
    """A table under which the loss raises."""

    def apply(self, step: Step, option: Option) -> Undo:
        @contextmanager
        def crashing(phase: str) -> Iterator[None]:
            yield
            raise RuntimeError("not with this lever on")

        undo = super().apply(step, option)
        step.running.around_loss.append(crashing)
        undo.then(step.running.around_loss.remove, crashing)
        return undo


def test_half_precision_that_a_checkpoint_of_the_users_does_not_take_is_not_offered() -> None:
    step, words = deep(checkpointed=True), list[str]()
    plain = seen(step)
    lever = with_captured({"precision": LEVERS["precision"]}, step, plain, seen, "rounded", words.append)["precision"]
    assert LEVERS["precision"].options(plain) and lever.options(plain) == []
    assert any(said.startswith("leaving out precision: the step fails with it (CheckpointError: ") for said in words)
    told = len(words)
    assert lever.options(plain) == [] and len(words) == told  # it is not tried again


def test_a_lever_under_which_the_step_raises_is_left_out_of_the_plan() -> None:
    step, words = deep(), list[str]()
    plain = memfit.profile(step, simulate=True)
    budget = plain.process_high_bytes - plain.peak_bytes // 4
    levers = {"saved": Crashing(), "microbatch": LEVERS["microbatch"]}
    found = find_plan(step, budget, levers=levers, quick=True, progress=words.append).plan
    assert [lever.name for lever in found.levers] == ["microbatch"]
    assert "leaving out saved: the step fails with it (RuntimeError: not with this lever on)" in words


def test_where_every_lever_fails_the_answer_is_a_no() -> None:
    step = deep()
    plain = memfit.profile(step, simulate=True)
    with pytest.raises(memfit.Infeasible):
        find_plan(step, plain.process_high_bytes - plain.peak_bytes // 4, levers={"saved": Crashing()}, quick=True)


def test_what_fails_beside_micro_batches_is_not_blamed_on_them() -> None:
    """They are tried alone before they are left out everywhere."""
    step, levers = deep(), {"saved": Crashing(), "microbatch": LEVERS["microbatch"]}
    plain = seen(step)
    assert plain.trace is not None
    parts = levers["microbatch"].options(plain)[0]
    table = table_option(plain.trace, dict.fromkeys(line_of(plain.trace).made, RECOMPUTE), "all again")
    planning = PlanSearch(step, Request(1, "reordered", None, None, levers, True, None), plain, plain, inf, lambda words: None)
    assert not planning._parts_fail([parts, table], RuntimeError())
    assert planning._parts_fail([parts], RuntimeError()) and not planning._parts_fail([table], RuntimeError())
