"""What the tables of the recipes are made of, before anything is measured for hours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import memfit
from recipes.kit.largest import EXACT, ROUNDED, WITHOUT_PARTS, largest_by_way
from recipes.kit.measuring import Measured
from recipes.pixel_loss import table as pixel_table
from recipes.pixel_loss.ways import BY_HAND, Case, asked_in_words, measured, measured_row
from recipes.radar_vae import table as radar_table
from recipes.radar_vae.ways import ways


def make_wide() -> memfit.Step:
    """Activations of 4 KiB a layer for each sample, and next to no parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1024), torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Linear(1024, 1))
    return memfit.Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.zeros(4, 1))


def test_the_largest_batch_of_every_way():
    step = memfit.profile(make_wide(), simulate=True, device="cuda")
    budget = f"{step.process_high_bytes + 400 * 2**10}B"

    cells = largest_by_way(budget, {"original": make_wide, "by hand": make_wide}, "cuda", rounding=True)

    assert list(cells) == ["original", "by hand", WITHOUT_PARTS, EXACT, ROUNDED]
    assert 4 < int(cells["original"]) == int(cells["by hand"]) < int(cells[EXACT].split()[0]) <= 256


def make_that_remembers() -> memfit.Step:
    """Refuses to be built twice in one process."""
    assert not _BUILT, "a simulation has been in this process before"
    _BUILT.append(True)
    return make_wide()


_BUILT: list[bool] = []


def test_each_way_is_asked_in_a_process_of_its_own_and_the_end_of_what_is_tried_is_no_limit():
    """What a simulation leaves in the process counts on a CPU: the rows that come later would get less."""
    cells = largest_by_way("1TiB", {"original": make_that_remembers, "by hand": make_that_remembers}, "cpu", rounding=True)

    assert cells == dict.fromkeys(["original", "by hand", WITHOUT_PARTS, EXACT, ROUNDED], "256 or more")


def test_what_is_not_run_is_predicted_and_the_first_way_that_ran_is_the_measure_of_time():
    found = [
        Measured("original", peak_bytes=100, refused="not run"),
        Measured("by hand", peak_bytes=80, refused="not run"),
        Measured("memfit", peak_bytes=25, process_bytes=30, seconds=2.0),
        Measured("memfit, less", peak_bytes=20, process_bytes=30, seconds=3.0),
    ]

    rows = [measured_row(Case(1024, 1), result, found)[2:6] for result in found]

    assert rows[0] == rows[1] == ["not run", "", "", ""]
    assert rows[2] == ["25 B", "75.0% of what is predicted", "30 B", "1.00"] and rows[3][3] == "1.50"


def test_no_way_is_run_that_is_predicted_not_to_fit_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**28))

    found = measured(Case(32, 1))

    assert all(result.refused.endswith("predicted for the process, 256 MiB free here") for result in found) and len(found) == 2


def _readme(path: Path) -> Path:
    path.write_text("<!-- table: main -->\n<!-- end -->\n")
    return path


def _rows(path: Path) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("|")]


def _measured(name: str, number: int) -> Measured:
    return Measured(name, peak_bytes=2**30 // number, process_bytes=2**30, seconds=float(number))


def test_the_main_table_of_pixel_loss_joins_all_that_is_known_of_a_way(tmp_path, monkeypatch):
    monkeypatch.setattr(pixel_table, "README", _readme(tmp_path / "README.md"))
    names = [*BY_HAND, *(asked_in_words(*asked) for asked in pixel_table.MAIN.asked)]
    here = {name: name.upper() for name in (*BY_HAND, WITHOUT_PARTS, EXACT, ROUNDED)}
    trained = [[way, "0.9", "10.00", f"0.{number}", "20.00"] for number, way in enumerate(pixel_table.TRAINING)]

    pixel_table.write_main([_measured(name, n) for n, name in enumerate(names, 1)], here, here, trained)

    header, _, *rows = _rows(pixel_table.README)
    assert {len(row) for row in rows} == {len(header)} and [row[0] for row in rows] == names
    assert [row[-2] for row in rows[-3:]] == [EXACT.upper(), EXACT.upper(), ROUNDED.upper()]
    assert rows[1][-2] == names[1].upper() and rows[1][-1] == "0.1, 20.00 dB" and rows[1][4] == "2.00"


def test_the_main_table_of_radar_vae_joins_all_that_is_known_of_a_way(tmp_path, monkeypatch):
    monkeypatch.setattr(radar_table, "README", _readme(tmp_path / "README.md"))
    names = [way.name for way in ways()]
    here = {name: name.upper() for name in (*names[:-3], WITHOUT_PARTS, EXACT, ROUNDED)}

    radar_table.write_main([_measured(name, n) for n, name in enumerate(names, 1)], here, here, dict.fromkeys(names, "0.5000"), None)

    header, _, *rows = _rows(radar_table.README)
    assert {len(row) for row in rows} == {len(header)} and [row[0] for row in rows] == names and header[-1].endswith("synthetic volumes")
    assert [row[-2] for row in rows[-3:]] == [EXACT.upper(), EXACT.upper(), ROUNDED.upper()] and rows[-1][-1] == "0.5000"


def test_a_budget_that_is_too_small_leaves_the_other_rows_standing(monkeypatch):
    monkeypatch.setitem(pixel_table.TRAINING, "memfit, 1MiB", (4, ["--budget", "1MiB"]))
    monkeypatch.setattr(pixel_table, "TRAINED", ["--data", "synthetic", "--image-size", "32", "--images", "1"])

    assert pixel_table.training_row("memfit, 1MiB") == ["memfit, 1MiB", "does not fit", "", "does not fit", ""]


def test_how_the_documented_fixes_compose(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: composition -->\n<!-- end -->\n")
    monkeypatch.setattr(radar_table, "README", readme)
    peaks = {name: 2**30 // number for number, name in enumerate(radar_table.LADDER, 1)}

    radar_table.write_composition(peaks, [_measured(way.name, n) for n, way in enumerate(ways(), 1)])

    _, _, *rows = _rows(readme)
    assert rows[0] == ["batch 1, accumulated 8 times", "8", "2.0", "2.0"]
    assert rows[-1] == ["ultra_lightweight and all three", "25 to 30", "11.0", "7.0"]
