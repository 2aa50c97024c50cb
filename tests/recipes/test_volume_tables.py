"""The volume autoencoder's tables: which ways they compare, in which order, and that their rows are joined by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.capture.simulation import built_without_memory
from recipes.kit.largest import EXACT, ROUNDED
from recipes.kit.measuring import Measured, Way
from recipes.volume_autoencoder import table, ways
from recipes.volume_autoencoder.config import changed, load_config
from recipes.volume_autoencoder.documented import FIVE, _scaled
from recipes.volume_autoencoder.high_resolution import seconds_a_step
from recipes.volume_autoencoder.train_autoencoder import CONFIGS, step_of

LITTLE: dict[str, Any] = {"name": "default", "voxel_size": (24, 24, 24), "batch_size": 2, "use_perceptual_loss": False}


@pytest.fixture(scope="module")
def plain() -> memfit.Ledger:
    return memfit.profile(built_without_memory(lambda: step_of(**LITTLE)), simulate=True)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("README", "RESULTS"):
        shutil.copy(getattr(table, name), tmp_path)
        monkeypatch.setattr(table, name, tmp_path / f"{name}.md")
    return tmp_path


def rows_of(page: Path, name: str) -> list[list[str]]:
    lines = page.read_text().split(f"<!-- table: {name} -->\n")[1].split("<!-- end -->")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def measured(names: list[str]) -> list[Measured]:
    return [Measured(name, (10 - n) * 2**20, 2**30, 2.0 + n, verdict="proven") for n, name in enumerate(names)]


def test_the_guides_rungs_are_configurations() -> None:
    """At the small size and at the documented one; all together are the smallest volumes with the fewest channels."""
    for size in (ways.SMALL, ways.DOCUMENTED):
        for keys in ways.by_hand(size).values():
            changed(load_config(CONFIGS / "default.yaml"), **{k: v for k, v in keys.items() if k != "name"})
    together = ways.by_hand(ways.SMALL)[ways.TOGETHER]
    assert (together["voxel_size"], together["num_channels"], together["mixed_precision"]) == ((24, 24, 32), (16, 32, 64), True)
    for _, _, keys in FIVE.values():
        config = _scaled(keys)["name"]
        changed(load_config(CONFIGS / f"{config}.yaml"), **{k: v for k, v in _scaled(keys).items() if k != "name"})


def test_exact_rungs_stand_first_and_altered_ones_last(plain: memfit.Ledger) -> None:
    ladder = table.ladder_of(plain, ways.memfits(plain))
    kinds = [kind for _, kind in ladder]
    assert ladder[0][0].name == ways.ORIGINAL and {"bitwise", "reordered"} >= set(kinds[1 : kinds.index("")])
    altered = kinds.index("altered")
    assert set(kinds[altered:]) == {"altered"} and ladder[-1][0].name == ways.TOGETHER
    names = [way.name for way, _ in ladder]
    assert {"attention: fused", "saved: every block made again", ways.ON_HOST} < set(names[:altered])
    assert not any(name.startswith("optimizer") for name in names)  # changes nothing at this peak


def test_the_names_of_ways_do_not_depend_on_what_the_process_holds_by_now(plain: memfit.Ledger) -> None:
    """Rows are joined by name, and a table measured again must find them."""
    later = replace(plain, process=replace(plain.process, base_bytes=plain.process.base_bytes + 10 * 2**20))
    assert [way.name for way in ways.memfits(later)] == [way.name for way in ways.memfits(plain)]
    assert [way.budget for way in ways.memfits(later)] != [way.budget for way in ways.memfits(plain)]


def test_a_rung_is_a_step_with_that_technique_on(plain: memfit.Ledger) -> None:
    blocks = next(way for way, _ in ways.exact_rungs(plain) if way.name == "saved: every block made again")
    step = built_without_memory(lambda: ways.step_with(blocks.settings["levers"], **LITTLE))
    assert memfit.profile(step, simulate=True).peak_bytes < plain.peak_bytes


def test_the_ladder_says_what_is_refused_and_what_is_not_run(pages: Path) -> None:
    found = [*measured([ways.ORIGINAL, "half"]), Measured("too much", refused="It does not fit.\nMore.")]
    table.write_ladder(found, ["the original", "altered", ""])
    assert rows_of(pages / "RESULTS.md", "ladder")[:3] == [
        [ways.ORIGINAL, "the original", "10.0 MiB", "1.00 GiB", "2.00", "1.00", ""],
        ["half", "altered", "9.00 MiB (0.90)", "1.00 GiB", "3.00", "1.50", ""],
        ["too much", "", "", "", "", "", "It does not fit."],
    ]
    assert [row[0] for row in rows_of(pages / "RESULTS.md", "ladder")[3:]] == ["DDP", "tiles"]


def test_the_main_table_joins_what_was_measured_with_what_is_predicted(pages: Path) -> None:
    names = [ways.ORIGINAL, "attention: fused", "memfit, exact, 60%", "memfit, rounded, 40%", "memfit, exact, 5%"]
    here, losses = {ways.ORIGINAL: "3", EXACT: "9", ROUNDED: "11"}, dict.fromkeys([names[0], *names[2:]], "0.2500")
    found = [*measured(names[:-1]), Measured(names[-1], refused="It does not fit.")]
    table.write_main(found, here, {name: f"{cell}0" for name, cell in here.items()}, losses, None)
    assert rows_of(pages / "README.md", "main") == [
        [ways.ORIGINAL, "10.0 MiB", "1.00 GiB", "1.00", "3", "30", "0.2500"],
        [names[2], "8.00 MiB (0.80)", "1.00 GiB", "2.00", "9", "90", "0.2500"],
        [names[3], "7.00 MiB (0.70)", "1.00 GiB", "2.50", "11", "110", "0.2500"],
        [names[4], "does not fit", "", "", "9", "90", "0.2500"],
    ]


def test_a_larger_batch_is_taken_whole_unless_accumulation_is_asked_for() -> None:
    """So that the largest batch is asked of the rung, and not of accumulation."""
    for more, parts in (({}, 1), ({"batch_size": 1, "gradient_accumulation_steps": 2}, 2)):
        step = ways.for_any_batch(**LITTLE | more)
        seen: list[int] = []
        step.models["autoencoder"].register_forward_hook(lambda module, given, made, seen=seen: seen.append(len(given[0])))
        step.run(torch.rand(2, 1, 24, 24, 24))
        assert len(seen) == parts


def test_equal_training_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "SMALL", LITTLE)
    trained = ways.learnt(Way("as it is", "", LITTLE), None)
    monkeypatch.setattr(ways, "STEPS", 0)
    assert float(trained) < float(ways.learnt(Way("as it is", "", LITTLE), None))


def test_a_way_that_does_not_fit_is_said_and_ends_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "SMALL", LITTLE)
    assert ways.learnt(Way("memfit", "", LITTLE, budget="1MiB"), None) == "does not fit"


def test_only_volumes_count_as_steps(tmp_path: Path) -> None:
    for name in ("a.npy", "b.nii.gz", "README.txt", "labels.csv"):
        (tmp_path / name).write_text("")
    assert seconds_a_step(30.0, tmp_path) == "15"
