from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

import memfit
from memfit.commands import COMMANDS
from memfit.commands.main import run
from memfit.commands.screen import Screen, progress_on
from memfit.errors import CannotSimulate, MemfitError, StepError
from memfit.records import Ledger, Owner, Process
from memfit.step import Step

MIB = 2**20
TRAIN = """
import os
import torch
import memfit
print("words of the user's")
os.system("echo words of a process of theirs")

def build():
    print("more words")
    model = torch.nn.Linear(4, 1)
    return memfit.Step(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, 4))
"""


def a_ledger(peak: int = 100 * MIB, predicted: bool = False) -> Ledger:
    owner = Owner(peak, "activations", "aten.mm.default", "net", "train.py:9")
    process = Process(0, measured_bytes=None if predicted else 2 * peak)
    sizes = (peak, 2 * peak, predicted, peak - MIB, peak + MIB, 2 * peak - MIB, 2 * peak + MIB)
    by_category = {"activations": peak}
    return Ledger(*sizes, 0.1, "cpu", 3, by_category, {}, {}, {}, (owner,), (), process, 0, (peak,), (), ())


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    sys.modules.pop("train", None)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the library was asked; it answers with a hand-made ledger and says something on standard output."""
    asked: list[dict[str, object]] = []

    def profile(step: Step, *, simulate: bool = False, device: str | None = None, progress: Callable[[str], None]) -> Ledger:
        asked.append({"batch": step.batch_size, "simulate": simulate, "device": device})
        progress("working")
        print("words while it runs")
        return a_ledger(peak=99 * MIB if simulate else 100 * MIB, predicted=simulate)

    monkeypatch.setattr(memfit, "profile", profile)
    return asked


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def profile(*args: object, **options: object) -> Ledger:
        raise error

    monkeypatch.setattr(memfit, "profile", profile)


def test_profile_shows_the_screen(profiled: list[dict[str, object]], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "train.py:build"]) == 0
    out, err = capfd.readouterr()
    assert "100 MiB  Peak     measured by torch's allocator events" in out and "train.py:9" in out
    assert err == ""
    assert profiled == [{"batch": 3, "simulate": False, "device": None}]


def test_profile_hands_its_options_on(profiled: list[dict[str, object]]) -> None:
    assert run(["profile", "train.py:build", "--simulate", "--device", "cuda"]) == 0
    assert profiled == [{"batch": 3, "simulate": True, "device": "cuda"}]


def test_json_is_all_that_is_on_standard_output(profiled: list[dict[str, object]], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "train.py:build", "--json"]) == 0
    out, err = capfd.readouterr()
    assert Ledger.from_dict(json.loads(out)) == a_ledger()
    assert out.count("\n") == 1
    for words in ("words of the user's", "words of a process of theirs", "more words", "words while it runs"):
        assert words in err


def test_standard_output_is_whole_again_after_json(profiled: list[dict[str, object]], capfd: pytest.CaptureFixture[str]) -> None:
    run(["profile", "train.py:build", "--json"])
    capfd.readouterr()
    print("python")
    os.write(1, b"descriptor\n")
    assert set(capfd.readouterr().out.split()) == {"python", "descriptor"}


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's way on a step that takes no time."""
    import torch

    from memfit import demo_step
    from memfit.commands import demo

    def small() -> Step:
        net = torch.nn.Linear(4, 1)
        return Step(net, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))

    monkeypatch.setattr(demo_step, "volume_autoencoder", small)
    monkeypatch.setattr(demo, "_BUDGET", "16GiB")


@pytest.mark.usefixtures("small_demo")
def test_demo_shows_the_whole_way(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo"]) == 0
    out = capfd.readouterr().out
    shown = [out.index(f"memfit {word} ") for word in ("profile", "plan", "verify", "fit")]
    assert shown == sorted(shown) and "It ran inside the budget" in out


@pytest.mark.usefixtures("small_demo")
def test_demo_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert values["schema"] == "memfit.demo/1" and values["verdict"]["equivalent"] and values["steps"] == len(values["losses"]) > 1


def test_the_demos_step_needs_several_gib_and_its_budget_is_a_fraction() -> None:
    from memfit.capture.simulation import built_without_memory
    from memfit.commands.demo import _BUDGET
    from memfit.demo_step import volume_autoencoder
    from memfit.units import parse_bytes

    needs = memfit.profile(built_without_memory(volume_autoencoder), simulate=True).peak_bytes
    assert needs > 3 * 2**30 and parse_bytes(_BUDGET) <= 0.5 * needs


@pytest.mark.parametrize(
    "error", [MemfitError("wrong, because; do this"), StepError(["the batch is empty"]), CannotSimulate(".item()", "train.py:3")]
)
def test_a_mistake_is_one_message_and_exit_2(
    error: MemfitError, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, error)
    assert run(["profile", "train.py:build"]) == 2
    assert capfd.readouterr().err == f"{error}\n"


def test_another_exit_code_of_an_error_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class DoesNotFit(MemfitError):
        exit_code = 1

    failing(monkeypatch, DoesNotFit("no"))
    assert run(["profile", "train.py:build"]) == 1


def test_a_bad_target_exits_2_and_leaves_standard_output_empty(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "trian.py:build", "--json"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("There is no file trian.py") and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile"], "Missing argument 'TARGET'"),
        (["profile", "train.py:build", "--simluate"], "--simulate"),
        (["profil", "x"], "No such command 'profil'"),
        (["profile", "train.py:build", "extra"], "unexpected extra argument"),
    ],
)
def test_a_wrong_command_line_exits_2(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    err = capfd.readouterr().err
    assert words in err and "Usage: memfit" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--help"], "profile"), (["profile", "--help"], "--simulate"), (["-h"], "demo"), (["--version"], "memfit, version")],
)
def test_help_and_version_exit_0(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert words in capfd.readouterr().out


def test_no_arguments_show_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capfd.readouterr().err


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert run(["profile", "train.py:build"]) == 130
    assert capfd.readouterr().err == "Interrupted.\n"


def test_a_fault_of_our_own_exits_3_and_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], project: Path
) -> None:
    failing(monkeypatch, KeyError("lost"))
    assert run(["profile", "train.py:build"]) == 3
    err = capfd.readouterr().err
    assert err.startswith("memfit failed: KeyError: 'lost'\nThis is a fault in memfit, not in your code.")
    assert "open an issue" in err and "Traceback" not in err
    (told,) = re.findall(r"whole traceback: (.+)$", err.strip())
    report = Path(told)
    assert report.parent == project
    text = report.read_text()
    assert "Traceback (most recent call last)" in text and "KeyError: 'lost'" in text and "torch" in text.splitlines()[0]


def test_a_closed_pipe_is_left_to_main() -> None:
    class Closed(io.StringIO):
        def write(self, words: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Screen(file=Closed()).print("words")


def test_progress_is_shown_to_a_terminal_only() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        with progress_on(Console(file=out, force_terminal=terminal, width=80)) as progress:
            progress("running a first step")
        assert ("running a first step" in out.getvalue()) is terminal


def started(*arguments: str) -> subprocess.Popen[str]:
    source = str(Path(memfit.__file__).parents[1])
    command = [sys.executable, "-m", "memfit", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source})


def test_the_program_itself_exits_with_the_codes(project: Path) -> None:
    (project / "stop.py").write_text("import os, signal\n\ndef build():\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n")
    expected = {("profile", "stop.py:build"): (130, "Interrupted.\n"), ("profile", "no.py:build"): (2, "There is no file no.py")}
    running = {arguments: started(*arguments) for arguments in expected}
    for arguments, (code, words) in expected.items():
        _, err = running[arguments].communicate(timeout=120)
        assert running[arguments].returncode == code and err.startswith(words)


def test_a_reader_that_left_is_no_fault() -> None:
    program = started("--help")
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.wait(timeout=120) == 141
    assert program.stderr.read() == ""
    program.stderr.close()


def test_every_command_can_answer_in_json_and_explains_itself() -> None:
    for command in COMMANDS:
        assert any("--json" in option.opts for option in command.params) and command.help
