from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from memfit.commands.main import run
from memfit.commands.target import load_step
from memfit.errors import MemfitError
from memfit.fitting.checking import grown_since, parse_tolerance
from memfit.records import Ledger

TWO = """
import torch
import memfit
from torch import nn

class Two(nn.Module):
    def __init__(self, wide, other):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(16, wide), nn.Linear(16, other), nn.GELU()

    def forward(self, x):
        with torch.no_grad():
            seen = self.a(x).mean()
        return self.act(self.b(x)).mean() + seen

def made(wide, other):
    net = Two(wide, other)
    return memfit.Step(net, lambda m, x: m(x), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4096, 16))

def made_8192_1024(): return made(8192, 1024)
def made_1024_1024(): return made(1024, 1024)
def made_8192_1536(): return made(8192, 1536)
"""
pytestmark = pytest.mark.usefixtures("train")


def answer(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    capfd.readouterr()
    code = run(["check", *arguments, "--json"])
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    return code, json.loads(out)


def test_a_step_that_fits_exits_0(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capfd, "train.py:build", "--budget", "16GiB")
    assert code == 0 and said["schema"] == "memfit.check/1"
    assert said["fits"] is True and said["budget_bytes"] == 16 * 2**30 and said["grown"] == []
    assert isinstance(said["process_bytes"], int) and str(said["reason"]).startswith("It fits 16.0 GiB: the process is predicted to take")


def test_a_step_that_does_not_fit_exits_1_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capfd, "train.py:build", "--budget", "8MiB")
    assert code == 1 and said["fits"] is False
    assert "It does not fit 8.00 MiB" in str(said["reason"]) and "too much. The peak is mostly" in str(said["reason"])
    assert run(["check", "train.py:build", "--budget", "8MiB"]) == 1
    assert "Does not fit\nIt does not fit 8.00 MiB" in capfd.readouterr().out


def test_a_step_that_leaves_memory_behind_exits_1_with_the_steps_it_fits_for(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capfd, "train.py:leaking", "--budget", "16GiB")
    assert code == 1 and said["fits"] is False and said["growth_bytes"] == 4 * 2**20
    assert f"It fits 16.0 GiB for {said['fits_steps']:,} steps only: " in str(said["reason"])
    assert answer(capfd, "train.py:build", "--budget", "16GiB")[1]["fits_steps"] is None


def test_growth_since_a_committed_record_is_a_no(train: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(["profile", "train.py:build", "--simulate", "--json"])
    (train / "baseline.json").write_text(capfd.readouterr().out)
    same = ["train.py:build", "--budget", "16GiB", "--baseline", "baseline.json"]
    assert answer(capfd, *same)[0] == 0
    code, said = answer(capfd, "train.py:grown", *same[1:])
    assert code == 1 and said["fits"] is True
    grown = said["grown"]
    assert isinstance(grown, list) and grown[0].keys() == {"module", "bytes"} and all(row["bytes"] > 0 for row in grown)
    assert "grew by more than 2% since baseline.json" in str(said["reason"])
    assert run(["check", "train.py:grown", *same[1:]]) == 1
    assert "Fits, but has grown" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("other", "arguments", "words"),
    [
        ({"predicted": False}, [], "it was measured, and this is predicted"),
        ({"batch_size": 12}, [], "its batch is 12, and this one's is 3"),
        ({}, ["--device", "cuda"], "it is for cpu, and this is for cuda"),
        ({"torch": "2.9.1"}, [], "its torch is 2.9.1, and this one's is 2."),
        ({"number of threads": "77", "instruction set": "DEFAULT"}, [], "its number of threads is 77, and this one's is"),
        ({"instruction set": "SIMD"}, [], "its instruction set is SIMD, and this one's is"),
        ({"batch": "float32 [3, 9]"}, [], "its batch is float32 [3, 9], and this one's is float32 [3, 4]"),
        ({"conditions": {}}, [], "an earlier memfit made it, and it does not say under which conditions. Make one that can"),
    ],
)
def test_a_baseline_that_is_of_something_else_is_refused(
    other: dict[str, object], arguments: list[str], words: str, train: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(["profile", "train.py:build", "--simulate", "--json"])
    made = json.loads(capfd.readouterr().out)
    changed = made | {key: value for key, value in other.items() if key in made}
    changed["conditions"] |= {key: value for key, value in other.items() if key not in made}
    (train / "baseline.json").write_text(json.dumps(changed))
    assert run(["check", "train.py:build", "--budget", "16GiB", "--baseline", "baseline.json", *arguments]) == 2
    err = capfd.readouterr().err
    assert words in err and f"memfit profile {' '.join(['train.py:build', '--simulate', *arguments])} --json > FILE" in err


def test_tolerance_is_of_each_module() -> None:
    from test_main import a_ledger

    before = replace(a_ledger(peak=250), most_by_module={"a": 100, "b": 100, "c": 50})
    now = replace(before, most_by_module={"a": 102, "b": 103, "new": 1})
    assert grown_since(before, now, 0.02) == [{"module": "b", "bytes": 3}, {"module": "new", "bytes": 1}]
    assert grown_since(before, now, 0.5) == []
    assert isinstance(before, Ledger)


def test_growth_of_a_thousandth_of_the_peak_is_no_growth_unless_the_peak_grew() -> None:
    from test_main import a_ledger

    before = replace(a_ledger(peak=100_000), most_by_module={"large": 99_990, "small": 10})
    now = replace(before, most_by_module={"large": 99_990, "small": 18, "new": 92}, peak_bytes=100_100)
    assert grown_since(before, now, 0.02) == []
    assert grown_since(before, now, 0) == [{"module": "new", "bytes": 92}, {"module": "small", "bytes": 8}]
    assert grown_since(before, replace(now, most_by_module=now.most_by_module | {"new": 101}), 0.02) == [{"module": "new", "bytes": 101}]
    many = {f"new{number}": 90 for number in range(30)}
    grown = grown_since(before, replace(now, most_by_module=now.most_by_module | many, peak_bytes=102_800), 0.02)
    assert {row["module"] for row in grown} == {"small", "new", *many}  # 2.8 % in all, though each of them is next to nothing


def test_a_peak_that_moves_makes_nobody_grow(capfd: pytest.CaptureFixture[str], train: Path) -> None:
    """The module that made the peak shrinks, and it comes at another moment, where the other one holds what it always held there."""
    (train / "two.py").write_text(TWO)

    def profiled(wide: int, other: int) -> Ledger:
        return memfit.profile(load_step(f"two.py:made_{wide}_{other}", simulate=True), simulate=True)

    before, shrunk, off_peak = profiled(8192, 1024), profiled(1024, 1024), profiled(8192, 1536)
    assert shrunk.peak_bytes < before.peak_bytes and shrunk.by_module["b"] > before.by_module.get("b", 0)
    assert grown_since(before, shrunk, 0.02) == []
    assert off_peak.by_module.get("b") == before.by_module.get("b") and off_peak.peak_bytes < 1.02 * before.peak_bytes
    grown = grown_since(before, off_peak, 0.02)
    assert {"module": "b", "bytes": 4096 * 512 * 4} in grown and not any(row["module"] == "a" for row in grown)
    before.save("baseline.json")
    same = ["--budget", "16GiB", "--baseline", "baseline.json"]
    assert answer(capfd, "two.py:made_1024_1024", *same)[1]["grown"] == []
    assert answer(capfd, "two.py:made_8192_1536", *same)[1]["grown"] == grown


def test_a_peak_that_grows_though_no_module_holds_more_than_it_ever_did_is_told() -> None:
    from test_main import a_ledger

    before = replace(a_ledger(peak=100), by_module={"a": 100}, most_by_module={"a": 100, "b": 80})
    now = replace(before, by_module={"a": 100, "b": 80}, peak_bytes=180)
    assert grown_since(before, now, 0.02) == [{"module": "b", "bytes": 80}]
    assert grown_since(before, replace(now, peak_bytes=102), 0.02) == []


def test_the_help_says_what_counts_as_growth(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--help"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "a twentieth of that share of the whole peak is no growth, unless the peak itself grew by more than the share" in said


@pytest.mark.parametrize("text", ["2", "much", "-1%", "%"])
def test_an_unreadable_tolerance_is_refused(text: str) -> None:
    with pytest.raises(MemfitError, match="is not a tolerance: write a percentage from 0% up, as in 2%"):
        parse_tolerance(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py:build"], "Missing option '--budget'"),
        (["train.py:build", "--budget", "much"], "'much' is not an amount of memory above zero"),
        (["train.py:build", "--budget", "1GiB", "--baseline", "nowhere.json"], "nowhere.json cannot be read"),
        (["train.py:build", "--budget", "1GiB", "--baseline", "train.py"], "train.py is not JSON"),
        (["train.py:build", "--budget", "1GiB", "--device", "abacus"], "'abacus' is not a device memfit can simulate"),
        (["train.py:looking", "--budget", "1GiB"], "This step cannot be simulated: train.py:"),
        (["train.py:broken", "--budget", "1GiB"], "This step cannot be trained:\n  - train.py:"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *arguments, "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and "Traceback" not in err and "memfit failed" not in err
