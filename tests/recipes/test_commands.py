"""memfit's own commands on the recipes, as their READMEs say; and what every file of a recipe keeps to."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from memfit.commands.main import run

RECIPES = Path(__file__).parents[2] / "recipes"
TARGETS = [
    "cifar10/train.py:make_step",
    "cifar10/train.py:make_baseline_step",
    "conditional_unet/train.py:make_step",
    "conditional_unet/train.py:make_factored_step",
    "pixel_loss/train.py:make_step",
    "radar_vae/train_latent_diffusion.py:make_step",
    "radar_vae/train_latent_diffusion.py:make_ldm_step",
    "volume_autoencoder/train_autoencoder.py:make_step",
]
PROGRAMS = sorted({RECIPES / target.partition(":")[0] for target in TARGETS} | set(RECIPES.glob("*/table.py")))


@pytest.mark.parametrize("target", TARGETS)
def test_the_commands_take_a_recipes_step(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a card, whose kernels need not be tried out first: that is what takes the time."""
    path = str(RECIPES / target)

    assert run(["profile", path, "--simulate", "--device", "cuda", "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert run(["check", path, "--budget", "100GiB", "--device", "cuda", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] and answer["process_bytes"] > peak > 2**20


def test_a_recipes_file_is_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in RECIPES.rglob("*.py")}

    assert lines and not {str(path): count for path, count in lines.items() if count > 250}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_program_opens_with_its_own_command_line(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert f"python {path.relative_to(RECIPES.parent)}" in told
