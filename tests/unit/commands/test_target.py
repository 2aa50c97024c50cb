from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import memfit.step.batches
from memfit.commands.target import load_step, step_errors
from memfit.errors import MemfitError, StepError, TargetError
from memfit.step import Step

GOOD = """
import torch
import memfit

def build(width=4):
    model = torch.nn.Linear(width, 1)
    return memfit.Step(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, width))
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own to stand in, with a good train.py; what is imported from it leaves nothing behind."""
    (tmp_path / "train.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def refusal(target: str, simulate: bool = False) -> str:
    with pytest.raises(TargetError) as caught:
        load_step(target, simulate)
    return str(caught.value)


def test_a_file_gives_its_step() -> None:
    step = load_step("train.py:build", simulate=False)
    assert isinstance(step, Step) and step.batch_size == 3
    assert not isinstance(step.batch, FakeTensor)


def test_a_simulated_step_takes_no_memory() -> None:
    step = load_step("train.py:build", simulate=True)
    assert isinstance(step.batch, FakeTensor) and all(isinstance(p, FakeTensor) for p in step.models[""].parameters())


def test_a_module_gives_its_step(project: Path) -> None:
    (project / "package").mkdir()
    (project / "package" / "__init__.py").touch()
    (project / "package" / "steps.py").write_text(GOOD)
    assert load_step("package.steps:build", simulate=False).batch_size == 3


def test_a_file_finds_its_neighbours_also_when_it_imports_late(project: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "neighbour.py").write_text(GOOD)
    (project / "sub" / "entry.py").write_text("def build():\n    import neighbour\n    return neighbour.build()\n")
    assert load_step("sub/entry.py:build", simulate=False).batch_size == 3


def test_a_loaded_file_is_a_module_that_others_can_find() -> None:
    load_step("train.py:build", simulate=False)
    assert sys.modules["train"].__file__ == str(Path("train.py").resolve())


def test_a_file_named_like_a_loaded_module_does_not_replace_it(project: Path) -> None:
    (project / "torch.py").write_text("import sys\nimport memfit\ntrain = __import__('train')\nbuild = train.build\n")
    assert load_step("torch.py:build", simulate=False).batch_size == 3
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize("target", ["train.py", "train.py:", ""])
def test_no_function_named(target: str) -> None:
    assert refusal(target) == f"{target!r} names no function: write path/to/file.py:function or package.module:function."


def test_no_file_named() -> None:
    assert refusal(":build") == "':build' names no file or module: write path/to/file.py:build or package.module:build."


def test_no_such_file_and_a_guess(project: Path) -> None:
    assert refusal("trian.py:build") == f"There is no file trian.py (seen from {project}). Did you mean train.py?"
    assert refusal("nowhere/x.py:build") == f"There is no file nowhere/x.py (seen from {project}). Check the path."


def test_a_directory_or_another_kind_of_file(project: Path) -> None:
    (project / "sub").mkdir()
    (project / "sub" / "notes.txt").touch()
    assert "is a directory: give the file in it" in refusal("./sub:build")
    assert "notes.txt is not a Python file" in refusal("sub/notes.txt:build")


def test_no_such_module(project: Path) -> None:
    message = refusal("no_such_package.steps:build")
    assert message.startswith(f"There is no module 'no_such_package', neither installed nor in {project}")
    assert "path/to/file.py:function" in message


def test_an_import_that_fails_inside_shows_the_users_line(project: Path) -> None:
    (project / "broken.py").write_text("import os\nimport not_installed_anywhere\n")
    told = (
        "broken.py:2 raised ModuleNotFoundError: No module named 'not_installed_anywhere'\n"
        "    import not_installed_anywhere\n"
        "Install what is missing, or run memfit in the environment your training runs in."
    )
    assert refusal("broken.py:build") == f"broken.py cannot be loaded: {told}"
    assert refusal("broken:build") == f"broken cannot be imported: {told}"
    assert "broken" not in sys.modules


def test_a_file_of_a_package_is_to_be_named_as_a_module(project: Path) -> None:
    (project / "part.py").write_text("from . import other\n")
    assert refusal("part.py:build").endswith("The file is part of a package: name it as package.module:function.")


def test_a_syntax_error_shows_the_users_line(project: Path) -> None:
    (project / "wrong.py").write_text("x = 1\ndef build(:\n")
    assert refusal("wrong.py:build").startswith("wrong.py cannot be loaded: wrong.py:2 raised SyntaxError: invalid syntax\n    def build(:")


def test_a_file_that_exits_is_told_so(project: Path) -> None:
    (project / "script.py").write_text("import sys\nsys.exit(1)\n")
    message = refusal("script.py:build")
    assert "script.py:2 raised SystemExit: 1" in message and 'if __name__ == "__main__"' in message


def test_no_such_function_with_a_guess_and_what_there_is(project: Path) -> None:
    (project / "train.py").write_text(GOOD + "\ndef other(): pass\n")
    assert refusal("train.py:biuld") == "train.py has no function 'biuld'. Did you mean train.py:build? It has build, other."
    assert refusal("train.py:xyz") == "train.py has no function 'xyz'. It has build, other."
    (project / "bare.py").write_text("from os.path import join\n")
    assert refusal("bare.py:build").endswith("It has no functions at all: write one that returns a memfit.Step.")


def test_something_that_is_no_function(project: Path) -> None:
    (project / "values.py").write_text("step = 3\n")
    assert refusal("values.py:step") == "values.py:step is an int, not a function: name a function that returns a Step."


def test_a_function_that_needs_arguments(project: Path) -> None:
    (project / "needy.py").write_text("def build(width, depth=1, *, heads, **more): pass\n")
    message = refusal("needy.py:build")
    assert message.startswith("needy.py:build needs arguments (width, heads), and memfit has none to give")
    assert message.endswith("give them defaults, or name a function that calls it.")


@pytest.mark.parametrize("simulate", [False, True])
def test_a_function_that_raises_shows_the_users_line_and_no_traceback(project: Path, simulate: bool) -> None:
    (project / "raises.py").write_text("import json\n\ndef build():\n    return json.loads('{')\n")
    message = refusal("raises.py:build", simulate)
    assert message.startswith("raises.py:build failed: raises.py:4 raised JSONDecodeError: Expecting property name")
    assert message.endswith("    return json.loads('{')") and "Traceback" not in message


@pytest.mark.parametrize(
    ("value", "told"), [("None", "None, not a Step: is its return statement missing?"), ("3", "an int, not a Step: return")]
)
def test_a_function_that_returns_something_else(project: Path, value: str, told: str) -> None:
    (project / "other.py").write_text(f"def build():\n    return {value}\n")
    assert f"other.py:build returned {told}" in refusal("other.py:build")


def test_a_step_that_cannot_be_trained_passes_as_it_is(project: Path) -> None:
    (project / "faulty.py").write_text(GOOD.replace("torch.ones(3, width)", "None"))
    with pytest.raises(StepError, match="no batch was given"):
        load_step("faulty.py:build", simulate=False)


def test_an_interrupt_is_not_swallowed(project: Path) -> None:
    (project / "stop.py").write_text("def build():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_step("stop.py:build", simulate=False)


def running(project: Path, loss: str) -> Step:
    (project / "runs.py").write_text(GOOD.replace("lambda m, b: m(b).mean()", "loss") + f"\ndef loss(m, b):\n    {loss}\n")
    return load_step("runs.py:build", simulate=False)


def test_what_the_step_raises_while_it_runs_is_the_users(project: Path) -> None:
    step = running(project, "return m(b[:, :2]).mean()")
    with pytest.raises(StepError) as caught, step_errors():
        step.run(step.batch)
    assert caught.value.faults[0].startswith("runs.py:10 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "return m(b[:, :2]).mean()" in caught.value.faults[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return m(b['x']).mean()", "raised TypeError"),  # torch is handed it by what simulates
        ("import sys; sys.exit('the loss is NaN')", "raised SystemExit: the loss is NaN"),
        ("raise type('Stop', (BaseException,), {})('enough')", "raised Stop: enough"),
    ],
)
def test_whatever_a_loss_raises_under_simulation_is_the_users_and_exits_2(project: Path, body: str, words: str) -> None:
    step = running(project, body)
    with pytest.raises(StepError) as caught, step_errors():
        memfit.profile(step, simulate=True)
    assert words in caught.value.faults[0] and body in caught.value.faults[0]


def test_out_of_memory_points_to_the_simulation(project: Path) -> None:
    step = running(project, "raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')")
    with pytest.raises(StepError, match="--simulate profiles it without touching any"), step_errors():
        step.run(step.batch)


def test_an_error_in_backward_is_the_users_though_no_line_of_theirs_runs(project: Path) -> None:
    step = running(project, "h = m(b).exp(); h.detach().mul_(2); return h.mean()")
    with pytest.raises(StepError, match="modified by an inplace operation"), step_errors():
        step.run(step.batch)


def test_an_error_of_memfits_own_is_not_blamed_on_the_user() -> None:
    with pytest.raises(ZeroDivisionError), step_errors():
        _ = 1 / 0
    with pytest.raises(MemfitError, match="as it is"), step_errors():
        raise MemfitError("as it is")


def test_an_error_of_what_watches_the_step_is_not_blamed_on_the_user() -> None:
    class Watching:
        def enter(self, phase: str, loss: str) -> None:
            list(memfit.step.batches.tensors_in(Broken()))

        def saw_loss(self, name: str, loss: torch.Tensor) -> None: ...

    class Broken(dict[str, int]):
        items = None  # type: ignore[assignment]

    step = load_step("train.py:build", simulate=False)
    with pytest.raises(TypeError), step_errors():
        step.run(step.batch, Watching())
