"""`memfit plan --largest-batch --json`, end to end: what it says is inside, and a little more is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memfit
from memfit.commands.main import run
from memfit.commands.target import load_step
from memfit.fitting import largest_batch as sizing
from memfit.fitting import plan_search, planning
from memfit.fitting.largest_batch import resized
from memfit.levers import LEVERS

TARGET = """
import torch
import memfit

def build():
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    return memfit.Step(net, lambda m, x: m(x).pow(2).mean(), optimizer, torch.ones(2048, 256))
"""
WITHOUT = {word: lever for word, lever in LEVERS.items() if word != "microbatch"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sizes and shorter searches than people get; everything else is as it is."""
    monkeypatch.setattr(sizing, "_AT_MOST", 4)
    monkeypatch.setattr(plan_search, "_ROUNDS", ((1.0, 1.0), (0.5, 1.0), (0.5, 1.0)))


@pytest.mark.usefixtures("quick")
def test_the_largest_batch_is_inside_and_the_next_size_is_not(train: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (train / "batches.py").write_text(TARGET)
    step = load_step("batches.py:build", simulate=True)

    def high(samples: int) -> int:
        """As it would be in the process that was asked: what the interpreter takes grows with each simulation."""
        now = memfit.profile(resized(step, samples), simulate=True)
        return now.process_high_bytes - now.process.base_bytes + base

    base = memfit.profile(step, simulate=True).process.base_bytes
    one, two = high(2048), high(4096)
    budget = (one + two) // 2
    assert run(["plan", "batches.py:build", "--budget", str(budget), "--largest-batch", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["largest_batch"]
    plain, whole, divided = (found[key] for key in ("plain", "without_microbatch", "with_microbatch"))
    assert 2048 < plain < 4096 and plain <= whole <= divided <= found["tried_up_to"] == 4 * 2048
    unsure = (two - one) // 8  # what the interpreter takes has moved a little since
    assert high(plain) <= budget + unsure and high(plain + 512) > budget
    assert planning.find_plan(resized(step, whole), budget + unsure, levers=WITHOUT).plan.feasible
    assert planning.find_plan(resized(step, divided), budget + unsure).plan.feasible
    if whole < 4 * 2048:
        with pytest.raises(memfit.Infeasible):
            planning.find_plan(resized(step, whole + whole // 8), budget - unsure, levers=WITHOUT, quick=True)


ONLY_ITS_OWN = """
import torch
import memfit

def build():
    net = torch.nn.Linear(4, 4)
    def loss(m, x):
        assert x.shape[0] == 4, "four rows"
        return m(x).pow(2).mean()
    return memfit.Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 4))
"""


def test_the_plan_is_there_where_the_largest_batch_is_not_to_be_found(train: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (train / "own.py").write_text(ONLY_ITS_OWN)
    ask = ["plan", "own.py:build", "--budget", "16GiB", "--largest-batch", "-o", "plan.json"]
    assert run(ask) == 2
    out, err = capfd.readouterr()
    assert "It fits as it is" in out and memfit.Plan.load("plan.json").feasible
    assert err.startswith("The largest batch could not be found. The loss does not take a batch of 8") and "Traceback" not in err
    Path("plan.json").unlink()
    assert run([*ask, "--json"]) == 2
    out, err = capfd.readouterr()
    said = json.loads(out)
    assert out.count("\n") == 1 and said["feasible"] is True and said["largest_batch"] is None and "a batch of 8" in err
    assert memfit.Plan.load("plan.json").feasible


def test_a_plan_that_cannot_be_written_is_shown(train: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def full(self: memfit.Plan, path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memfit.Plan, "save", full)
    assert run(["plan", "train.py:build", "--budget", "16GiB", "-o", "plan.json", "--json"]) == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["feasible"] is True and err.endswith(
        "cannot be written to plan.json: No space left on device. Give another file with -o.\n"
    )
