from __future__ import annotations

import json
from dataclasses import replace

import pytest

import memfit
from memfit.commands.main import run
from memfit.records import Ledger, Plan, Verdict

pytestmark = pytest.mark.usefixtures("train")


def test_it_fits_proves_and_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--steps", "2"]) == 0
    out = capfd.readouterr().out
    for words in ("It fits as it is", "Equivalent\nThe fitted step is the same training, bit for bit.", "It ran inside the budget: "):
        assert words in out
    assert out.index("memfit plan") < out.index("memfit verify") < out.index("memfit fit")


def test_json_is_the_fitted_profile_and_all_that_led_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--steps", "3", "--json"]) == 0
    out = capfd.readouterr().out
    said = json.loads(out)
    assert out.count("\n") == 1 and said["schema"] == "memfit.fit/1"
    profile = Ledger.from_dict(said | {"schema": "memfit.profile/1"})
    assert not profile.predicted and sum(profile.by_category.values()) == profile.peak_bytes
    assert profile.process_bytes == profile.process.measured_bytes > 2**26  # the operating system's word
    assert Ledger.from_dict(said["baseline"]).predicted and Plan.from_dict(said["plan"]).feasible
    assert Verdict.from_dict(said["verdict"]).equivalent
    assert said["slowdown_is"] == "predicted" and said["slowdown_on_sample"] is None  # nothing was put on that could be slower
    assert said["slowdown"] == 1.0 and said["steps"] == 3 == len(said["losses"])
    assert said["losses"][0] > said["losses"][2]  # it really trained


@pytest.mark.parametrize(("target", "count"), [("loaded", 4), ("phased", 1)])
def test_batches_of_the_loader_and_losses_of_phases(target: str, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", f"train.py:{target}", "--budget", "16GiB", "--steps", str(count), "--json"]) == 0
    losses = json.loads(capfd.readouterr().out)["losses"]
    assert len(losses) == count  # more than the loader's two batches: a second epoch begins
    assert (list(losses[0]) == ["only"]) if target == "phased" else all(isinstance(loss, float) for loss in losses)


def test_an_impossible_budget_exits_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "train.py:build", "--budget", "1MiB"]) == 1
    out, err = capfd.readouterr()
    assert "memfit plan" not in out and err.startswith("This step does not fit 1.00 MiB")


def test_json_says_that_nothing_fits_as_a_plan_would(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--steps", "1", "--json"]) == 0
    yes = json.loads(capfd.readouterr().out)
    assert run(["fit", "train.py:build", "--budget", "1MiB", "--json"]) == 1
    out = capfd.readouterr().out
    said = json.loads(out)
    assert said.keys() == yes.keys() and yes["plan"].keys() <= said["plan"].keys()
    assert {key for key, value in said.items() if value is not None} == {"schema", "plan", "reason"}
    assert out.count("\n") == 1 and said["schema"] == "memfit.fit/1" and said["verdict"] is None
    assert said["reason"].startswith("This step does not fit 1.00 MiB") and said["plan"]["reason"] == said["reason"]
    plan = said["plan"]
    assert plan["schema"] == "memfit.plan/2" and plan["feasible"] is False and plan["budget_bytes"] == 2**20
    assert plan["lowest_bytes"] == plan["reachable_bytes"]["reordered"] > 2**20


def test_json_of_a_no_has_every_key_of_a_yes(capfd: pytest.CaptureFixture[str]) -> None:
    run(["fit", "train.py:build", "--budget", "16GiB", "--steps", "1", "--json"])
    yes = json.loads(capfd.readouterr().out)
    run(["fit", "train.py:build", "--budget", "1MiB", "--json"])
    no = json.loads(capfd.readouterr().out)
    assert no.keys() == yes.keys()
    assert {key for key, value in no.items() if value is not None} == {"schema", "plan", "reason"}
    assert no["plan"].keys() >= yes["plan"].keys()


def test_json_says_which_plan_the_proof_refused_and_why(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from memfit.fitting import proven_plans
    from small_levers import WRONG, SmallLever, plan_of

    wrong: SmallLever = WRONG["weakened"]
    found = proven_plans.find_plan

    def planned(step: memfit.Step, budget: int, **options: object) -> object:
        return replace(found(step, budget), plan=plan_of(step, wrong))

    fit = memfit.fit
    monkeypatch.setattr(proven_plans, "find_plan", planned)
    monkeypatch.setattr(memfit, "fit", lambda step, budget, **options: fit(step, budget, levers={wrong.name: wrong}))
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--json"]) == 1
    out = capfd.readouterr().out
    said = json.loads(out)
    verdict = Verdict.from_dict(said["verdict"])
    assert out.count("\n") == 1 and not verdict.equivalent and verdict.culprit == "weakened"
    assert said["reason"].startswith("The fitted step is not the same training") and "weakened" in said["reason"]
    assert [lever.name for lever in Plan.from_dict(said["plan"]).levers] == ["weakened"]


def test_the_demo_says_no_as_fit_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fit(step: memfit.Step, budget: str, **options: object) -> memfit.Fitted:
        print("words of the user's")
        raise memfit.Infeasible("It does not fit here.", 7, {"bitwise": 9})

    monkeypatch.setattr("memfit.demo_step.volume_autoencoder", lambda: None)
    monkeypatch.setattr(memfit, "fit", fit)
    assert run(["demo", "--json"]) == 1
    out = capfd.readouterr().out
    said = json.loads(out)
    assert out.count("\n") == 1 and said["schema"] == "memfit.demo/1" and said["reason"] == "It does not fit here."
    assert said["plan"]["feasible"] is False and said["plan"]["lowest_bytes"] == 7


def test_a_plan_that_there_is_no_room_to_prove_is_a_no(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from memfit.fitting import proven_plans
    from memfit.fitting.planning import find_plan

    monkeypatch.setattr(proven_plans, "find_plan", lambda step, budget, **options: find_plan(step, "16GiB"))
    assert run(["fit", "train.py:build", "--budget", "8MiB"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("The plain step cannot be run inside 8.00 MiB") and "Give a larger --budget" in err
    assert run(["fit", "train.py:build", "--budget", "8MiB", "--json"]) == 1
    said = json.loads(capfd.readouterr().out)
    assert said["reason"].startswith("The plain step cannot be run inside 8.00 MiB")
    assert Plan.from_dict(said["plan"]).budget_bytes == 16 * 2**30  # it is the proof that has no room


def test_a_run_that_left_its_budget_is_a_no(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Prediction and promise are the planner's; what is measured is told in any case."""
    plain = memfit.fit

    def fit(step: memfit.Step, budget: int, **options: object) -> memfit.Fitted:
        fitted = plain(step, "16GiB")
        return replace(fitted, plan=replace(fitted.plan, budget_bytes=budget))

    monkeypatch.setattr(memfit, "fit", fit)
    assert run(["fit", "train.py:build", "--budget", "8MiB", "--steps", "1"]) == 1
    assert "It ran outside the budget: " in capfd.readouterr().out
    assert run(["fit", "train.py:build", "--budget", "8MiB", "--steps", "1", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["reason"].startswith("It ran outside the budget: the process took ")


def test_a_plan_that_was_written_is_applied_later(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py:build", "--budget", "16GiB", "-o", "plan.json"]) == 0
    asked = ["fit", "train.py:build", "--budget", "8GiB", "--plan", "plan.json", "--steps", "1"]
    capfd.readouterr()
    assert run([*asked, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["plan"]["budget_bytes"] == 8 * 2**30 and said["plan"]["step"] == Plan.load("plan.json").step
    assert run(["fit", "train.py:wider", *asked[2:]]) == 2
    assert (
        "This plan was made for another step:\n  - model: Linear(in_features=4, out_features=1, bias=False), training when"
        in capfd.readouterr().err
    )
    asked[3] = "8MiB"
    assert run([*asked, "--json"]) == 1
    said = json.loads(capfd.readouterr().out)
    assert said["plan"]["feasible"] is False and said["reason"].startswith("With this plan the step would take up to ")


def test_a_plan_for_another_device_is_one_message_and_exit_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train.py:build", "--budget", "16GiB", "--device", "cuda", "-o", "plan.json"]) == 0
    capfd.readouterr()
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--plan", "plan.json", "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "This plan was made for cuda, and this step is on cpu" in err and err.endswith("or plan again for cpu.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py:build"], "Missing option '--budget'"),
        (["train.py:build", "--budget", "much"], "'much' is not an amount of memory above zero"),
        (["train.py:build", "--budget", "1GiB", "--allow", "sloppy"], "There is no exactness 'sloppy'"),
        (["train.py:build", "--budget", "1GiB", "--steps", "0"], "Invalid value for '--steps'"),
        (
            ["train.py:build", "--budget", "1GiB", "--plan", "none.json"],
            "none.json cannot be read: No such file or directory. Make it with",
        ),
        (["train.py:broken", "--budget", "1GiB"], "This step cannot be trained:\n  - train.py:"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", *arguments, "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and "Traceback" not in err and "memfit failed" not in err


def test_compiling_is_measured_only_where_the_plain_step_has_room(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.fitting.compiling.memory_left", lambda: 2**20)
    monkeypatch.setattr("memfit.levers.compile.compiler_found", lambda device: True)
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--compile-for", "1000"]) == 2
    err = capfd.readouterr().err
    assert "What compiling gives is measured beside the plain step, which may take up to" in err
    assert "this machine has 1.00 MiB for it. Leave out compile, or measure it where the plain step fits." in err


def test_what_was_measured_of_compiling_is_among_the_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.levers.compile import CompileLever

    measured, asked = CompileLever(), list[object]()
    monkeypatch.setattr("memfit.fitting.compiling.measured_compile", lambda step, run_steps, progress: asked.append(run_steps) or measured)

    def fit(step: object, budget: object, *, levers: dict[str, object], **options: object) -> None:
        asked.append(levers["compile"])
        raise memfit.MemfitError("enough")

    monkeypatch.setattr(memfit, "fit", fit)
    assert run(["fit", "train.py:build", "--budget", "16GiB", "--compile-for", "1000"]) == 2
    assert asked == [1000, measured]
