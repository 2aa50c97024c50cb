from __future__ import annotations

import json
from pathlib import Path

import pytest

import memfit
from memfit.commands.main import run
from memfit.records import EXACTNESS, Plan, PlannedLever

pytestmark = pytest.mark.usefixtures("train")
KEYS = {
    "schema", "feasible", "budget_bytes", "predicted_peak_bytes", "predicted_process_bytes", "predicted_slowdown", "exactness", "levers",
    "alternatives", "reachable_bytes", "planning_seconds",
}  # fmt: skip


def test_a_budget_above_the_need_gives_the_empty_plan(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py:build", "--budget", "16GiB"]) == 0
    assert "It fits as it is: nothing has to be changed." in capfd.readouterr().out


def test_json_is_all_that_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py:build", "--budget", "16GiB", "--json"]) == 0
    out = capfd.readouterr().out
    said = json.loads(out)
    assert out.count("\n") == 1 and said.keys() >= KEYS and said["feasible"] is True and said["budget_bytes"] == 16 * 2**30
    assert Plan.from_dict(said).levers == ()
    assert said["reachable_bytes"] == dict.fromkeys(EXACTNESS)  # nothing had to be weighed


def test_an_impossible_budget_exits_1_with_what_would_help(capfd: pytest.CaptureFixture[str], train: Path) -> None:
    assert run(["plan", "train.py:build", "--budget", "1MiB", "-o", "plan.json"]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("This step does not fit 1.00 MiB: the lowest that can be reached") and "What would help" in err
    assert "memfit plan" not in out and not (train / "plan.json").exists()
    assert run(["plan", "train.py:build", "--budget", "1MiB", "--json"]) == 1
    said = json.loads(capfd.readouterr().out)
    assert said.keys() >= KEYS and said["feasible"] is False and said["budget_bytes"] == 2**20
    reachable = list(said["reachable_bytes"].values())
    assert reachable == sorted(reachable, reverse=True)  # a looser class never reaches less: what is stricter is in it
    assert said["reachable_bytes"]["reordered"] > 2**20 and said["predicted_peak_bytes"] is None and "does not fit" in said["reason"]
    assert all(said["reachable_bytes"][word] > 2**20 for word in EXACTNESS)
    assert said["lowest_bytes"] == said["reachable_bytes"]["reordered"]


def test_a_plan_that_was_written_is_verified_later(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py:build", "--budget", "16GiB", "-o", "plan.json"]) == 0
    assert Plan.load("plan.json").feasible
    assert run(["verify", "train.py:build", "--plan", "plan.json"]) == 0  # built for real now, and still the same step
    capfd.readouterr()
    assert run(["verify", "train.py:wider", "--plan", "plan.json"]) == 2
    assert (
        "This plan was made for another step:\n  - model: Linear(in_features=4, out_features=1, bias=False), training when"
        in capfd.readouterr().err
    )


def test_options_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def plan(step: memfit.Step, budget: int, **options: object) -> Plan:
        asked.append((budget, options["allow"], options["device"], options["host_budget"]))
        return Plan(True, budget, 1, 2, 1.1, "rounded", (PlannedLever("precision", "bfloat16", "rounded"),))

    monkeypatch.setattr(memfit, "plan", plan)
    assert run(["plan", "train.py:build", "--budget", "6GiB", "--allow", "rounded", "--device", "cuda", "--host-budget", "9GiB"]) == 0
    assert asked == [(6 * 2**30, "rounded", "cuda", "9GiB")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py:build"], "Missing option '--budget'"),
        (["train.py:build", "--budget", "much"], "'much' is not an amount of memory above zero"),
        (["train.py:build", "--budget", "0GiB"], "'0GiB' is not an amount of memory above zero"),
        (["train.py:build", "--budget", "1GiB", "--allow", "sloppy"], "There is no exactness 'sloppy': allow one of bitwise, reordered"),
        (["train.py:build", "--budget", "1GiB", "--device", "abacus"], "'abacus' is not a device memfit can simulate"),
        (["train.py:build", "--budget", "0.1"], "'0.1' is not an amount of memory above zero"),
        (["none.py:build", "--budget", "16GiB", "-o", "."], "it is a folder. Give a file in it, as in -o plan.json"),
        (["none.py:build", "--budget", "16GiB", "-o", "no/where/plan.json"], "The plan cannot be written to no/where/plan.json"),
        (["none.py:build", "--budget", "16GiB", "-o", "."], "it is a folder. Give a file in it, as in -o plan.json"),
        (["none.py:build", "--budget", "16GiB", "-o", "no/where/plan.json"], "there is no folder no/where. Make it, or give another file"),
        (["none.py:build", "--budget", "16GiB", "-o", ""], "-o has an empty name. Give a file, as in -o plan.json, or leave -o out"),
        (["train.py:broken", "--budget", "1GiB"], "This step cannot be trained:\n  - train.py:"),
        (["train.py:looking", "--budget", "1GiB"], "This step cannot be simulated: train.py:"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments, "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and "Traceback" not in err and "memfit failed" not in err
