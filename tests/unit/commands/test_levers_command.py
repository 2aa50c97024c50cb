from __future__ import annotations

import json

import pytest

from memfit.commands.main import run
from memfit.levers import LEVERS
from memfit.records import EXACTNESS


def test_every_lever_is_listed_with_what_it_needs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["levers"]) == 0
    out = capfd.readouterr().out
    assert all(f"\n{word} " in out for word in LEVERS)


def test_json_has_the_same_rows(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["levers", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["schema"] == "memfit.levers/1" and [row["name"] for row in said["levers"]] == list(LEVERS)
    assert all(row["exactness"] in EXACTNESS and row["needs"] for row in said["levers"])
