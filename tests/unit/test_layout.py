"""The house rules: who may import whom, how long things may get, and what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import memfit

ROOT = Path(memfit.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PUBLIC = {
    "CannotSimulate", "Fitted", "Infeasible", "Ledger", "MemfitError", "NotEquivalent", "Phase", "Plan", "Step", "StepError", "Verdict",
    "chunked", "fit", "plan", "profile", "verify",
}  # fmt: skip
MAY_NOT_IMPORT = {
    "units": {"torch", "memfit.step", "memfit.capture", "memfit.ledger", "memfit.report", "memfit.commands", "memfit.records"},
    "errors": {"torch", "memfit"},
    "record": {"torch", "memfit.step", "memfit.capture", "memfit.ledger", "memfit.report", "memfit.commands", "memfit.records"},
    "records": {"torch", "memfit.step", "memfit.capture", "memfit.ledger", "memfit.report", "memfit.commands"},
    "ledger": {"torch", "memfit.step", "memfit.capture", "memfit.report", "memfit.commands"},
    "report": {"torch", "memfit.step", "memfit.capture", "memfit.ledger", "memfit.commands"},
    "capture": {"memfit.ledger", "memfit.report", "memfit.commands"},
    "ops": {"memfit.step", "memfit.records", "memfit.capture", "memfit.ledger", "memfit.levers", "memfit.planner", "memfit.report"},
    "levers": {"memfit.capture", "memfit.planner", "memfit.proof", "memfit.report"},
    "planner": {"torch", "memfit.step", "memfit.capture", "memfit.proof", "memfit.report"},
    "proof": {"memfit.planner", "memfit.report", "memfit.commands"},
    "fitting": {"memfit.report", "memfit.commands"},
    "step": {"memfit.capture", "memfit.ledger", "memfit.levers", "memfit.planner", "memfit.fitting", "memfit.report", "memfit.commands"},
}


def imports_of(source: str) -> set[str]:
    tree = ast.parse(source)
    direct = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return direct | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def forbidden(room: str, source: str) -> set[str]:
    others = {name for name in imports_of(source) if not name.startswith(f"memfit.{room}.")}
    return {name for name in others if any(name == no or name.startswith(no + ".") for no in MAY_NOT_IMPORT.get(room, ()))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_to_the_rooms(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert not forbidden(room, path.read_text())
    if room not in ("commands", "__main__"):
        assert not any(name.startswith("memfit.commands") for name in imports_of(path.read_text()))
    assert not any(name.split(".")[0] == "recipes" for name in imports_of(path.read_text()))


def private_imports(source: str) -> set[str]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level == 0]
    names = imports_of(source) | {f"{node.module}.{alias.name}" for node in found for alias in node.names}
    return {name for name in names if name.startswith("torch.") and "._" in name}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_private_in_torch_is_imported_in_one_place(path: Path) -> None:
    assert path.name == "torch_private.py" or not private_imports(path.read_text())


def test_the_import_rules_can_fail() -> None:
    assert forbidden("ledger", "import torch.nn") == {"torch.nn"}
    assert private_imports("import torch._dynamo") == {"torch._dynamo"}
    assert "torch.nn.modules.batchnorm._BatchNorm" in private_imports("from torch.nn.modules.batchnorm import _BatchNorm")
    assert forbidden("report", "from memfit.capture import capture") == {"memfit.capture"}


def without_torch(script: str) -> subprocess.CompletedProcess[str]:
    blocked = "import sys; sys.modules['torch'] = None; " + script
    return subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)


def test_a_record_is_read_without_torch(tmp_path: Path) -> None:
    """The rooms that must not need torch really run where there is none."""
    memfit.Plan(True, 1, 1, 1, 1.0, "bitwise", ()).save(tmp_path / "plan.json")
    rooms = "import memfit, memfit.ledger, memfit.report.terminal"
    ran = without_torch(f"{rooms}; print(memfit.Plan.load({str(tmp_path / 'plan.json')!r}).feasible)")
    assert ran.stdout.strip() == "True", ran.stderr
    assert "torch" in without_torch("import memfit.step").stderr  # the block itself works


def test_help_does_not_wait_for_torch() -> None:
    for arguments in (["--help"], ["fit", "--help"], ["levers", "--help"]):
        ran = without_torch(f"from memfit.commands.main import run; sys.exit(run({arguments}))")
        assert ran.returncode == 0 and "Usage: memfit" in ran.stdout, ran.stderr


def lengths() -> tuple[list[int], list[int]]:
    files, functions = [], []
    for path in FILES:
        text = path.read_text()
        files.append(len(text.splitlines()))
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        functions += [(n.end_lineno or n.lineno) - n.lineno + 1 for n in nodes]
    return files, functions


def test_files_and_functions_stay_short() -> None:
    files, functions = lengths()
    assert max(files) <= 400 and median(files) <= 130
    assert max(functions) <= 60 and median(functions) <= 10


def test_the_public_names() -> None:
    assert set(memfit.__all__) == PUBLIC <= set(dir(memfit))
    assert not hasattr(memfit, "nothing_of_that_name")
    assert all((getattr(memfit, name).__doc__ or "").strip() for name in PUBLIC)
    assert all(">>>" in (getattr(memfit, name).__doc__ or "") for name in ("Step", "Phase", "chunked", "fit", "plan", "profile", "verify"))
