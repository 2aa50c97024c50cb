from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from memfit.commands.main import run
from memfit.levers import LEVERS
from memfit.records import Plan, Verdict
from small_levers import NOTHING, WRONG, plan_of

TRAIN = """
import torch
import memfit
print("words of the user's")

def build(width=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    return memfit.Step(model, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, width))

def wider():
    return build(8)

def without_values():
    with torch.device("meta"):
        return build()

def broken():
    step = build()
    return memfit.Step(step.model, lambda m, b: m(b[:, :2]).mean(), step.optimizer, step.batch)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for lever in (NOTHING, WRONG["weakened"]):
        monkeypatch.setitem(LEVERS, lever.name, lever)
    import train  # type: ignore[import-not-found]

    plan_of(train.build(), NOTHING).save("plan.json")
    plan_of(train.broken(), NOTHING).save("broken.json")
    plan_of(train.build(), NOTHING, WRONG["weakened"]).save("wrong.json")
    yield tmp_path
    sys.modules.pop("train", None)


def test_yes_is_shown_and_exits_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "train.py:build", "--plan", "plan.json"]) == 0
    out, err = capfd.readouterr()
    assert "Equivalent\nThe fitted step is the same training, bit for bit." in out and err == ""


def test_no_exits_1_and_names_the_lever(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "train.py:build", "--plan", "wrong.json"]) == 1
    out = capfd.readouterr().out
    assert "Not equivalent" in out and "To blame  weakened" in out and "the gradient of weight: off by" in out


@pytest.mark.parametrize(("plan", "code"), [("plan.json", 0), ("wrong.json", 1)])
def test_json_is_all_that_is_on_standard_output(plan: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "train.py:build", "--plan", plan, "--json"]) == code
    out = capfd.readouterr().out
    verdict = Verdict.from_dict(json.loads(out))
    assert out.count("\n") == 1 and verdict.equivalent == (code == 0) and json.loads(out)["schema"] == "memfit.verdict/1"
    assert json.loads(out)["worst"].keys() == {"what", "error", "bound"}


def test_where_nothing_can_be_compared_the_answer_is_an_honest_no(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "train.py:build", "--plan", "wrong.json", "--limit", "8MiB"]
    assert run(arguments) == 1
    out, err = capfd.readouterr()
    assert err.startswith("The plain step cannot be run inside 8.00 MiB") and "Not equivalent" not in out
    assert run([*arguments, "--json"]) == 1
    answer = json.loads(capfd.readouterr().out)
    verdict = Verdict.from_dict(answer)
    assert verdict.unproven and not verdict.equivalent and verdict.not_compared == ("nothing", "weakened") and verdict.levers == ()
    assert answer["reason"].startswith("The plain step cannot be run inside 8.00 MiB") and answer["lowest_bytes"] > 8 * 2**20


def test_steps_and_limit_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = memfit.verify

    def verify(step: memfit.Step, plan: Plan, **options: object) -> Verdict:
        asked.append((options["steps"], options["limit_bytes"]))
        return plain(step, plan)

    monkeypatch.setattr(memfit, "verify", verify)
    assert run(["verify", "train.py:build", "--plan", "plan.json", "--steps", "2", "--limit", "4GiB"]) == 0
    assert asked == [(2, 4 * 2**30)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py:build", "--plan", "nowhere.json"], "nowhere.json cannot be read"),
        (["train.py:build", "--plan", "nowhere.json"], "Make it with memfit plan TARGET --budget BYTES -o FILE."),
        (["train.py:build", "--plan", "train.py"], "train.py is not JSON"),
        (["train.py:build", "--plan", "no_size.json"], "The plan's microbatch is damaged: 'size' is missing. Plan again"),
        (["train.py:build", "--plan", "odd_size.json"], "The plan's microbatch is damaged: 'size' is 'x'. Plan again"),
        (["train.py:build", "--plan", "odd_table.json"], "The plan's saved is damaged: its settings cannot be read"),
        (["train.py:build", "--plan", "odd_how.json"], "The plan's optimizer is damaged: 'how' is 'foo'. Plan again"),
        (["train.py:without_values", "--plan", "plan.json"], "its tensors are on meta and hold no values"),
        (["train.py:wider", "--plan", "plan.json"], "This plan was made for another step:\n  - model: Linear(in_features=4, "),
        (["train.py:build", "--plan", "unknown.json"], "a lever 'unknown', which this memfit does not have"),
        (["train.py:build"], "Missing option '--plan'"),
        (["train.py:build", "--plan", "plan.json", "--limit", "much"], "'much' is not an amount of memory"),
        (["train.py:broken", "--plan", "broken.json"], "This step cannot be trained:\n  - train.py:20 raised RuntimeError"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan.load("plan.json")
    replace(plan, levers=(replace(plan.levers[0], name="unknown"),)).save("unknown.json")
    for name, lever, settings in (
        ("no_size", "microbatch", {}),
        ("odd_size", "microbatch", {"size": "x"}),
        ("odd_table", "saved", {"": [3]}),
        ("odd_how", "optimizer", {"how": "foo"}),
    ):
        replace(plan, levers=(replace(plan.levers[0], name=lever, settings=settings),)).save(f"{name}.json")
    assert run(["verify", *arguments]) == 2
    err = capfd.readouterr().err
    assert words in err and "Traceback" not in err and "memfit failed" not in err
