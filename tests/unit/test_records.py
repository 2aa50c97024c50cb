from __future__ import annotations

import json
from pathlib import Path

import pytest

import memfit
from memfit import Ledger
from memfit.errors import RecordError
from memfit.records import CATEGORIES, Trace
from small_steps import two_phases

CONTRACT = {
    "schema", "peak_bytes", "process_bytes", "predicted", "low_bytes", "high_bytes", "step_seconds", "by_category", "at_peak", "findings"
}  # fmt: skip


def test_a_ledger_and_its_trace_survive_a_file(tmp_path: Path) -> None:
    ledger = memfit.profile(two_phases(), simulate=True)
    assert ledger.trace is not None
    ledger.save(tmp_path / "ledger.json")
    ledger.trace.save(tmp_path / "trace.json")
    assert Ledger.load(tmp_path / "ledger.json") == ledger
    assert Trace.load(tmp_path / "trace.json") == ledger.trace


def test_the_keys_that_scripts_rely_on() -> None:
    told = memfit.profile(two_phases(), simulate=True).to_dict()
    assert told.keys() >= CONTRACT
    assert told["schema"] == "memfit.profile/1" and tuple(told["by_category"]) == CATEGORIES
    assert all(set(owner) == {"bytes", "category", "op", "module", "source"} for owner in told["at_peak"])
    assert all(set(finding) == {"kind", "bytes", "where", "why", "lever"} for finding in told["findings"])
    assert all(type(told[key]) is int for key in told if key.endswith("_bytes"))
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": "memfit.profile/2"}', "version 2, this memfit reads up to 1: upgrade memfit"),
        ('{"schema": "memfit.trace/1"}', "This is not a memfit.profile record: its schema is 'memfit.trace/1'"),
        ('{"schema": "memfit.profile/1"}', "lacks"),
        ("[1, 2]", "holds no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_unreadable_records_say_why(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match=words):
        Ledger.load(tmp_path / "record.json")


def test_a_missing_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nowhere\.json cannot be read: No such file"):
        Ledger.load(tmp_path / "nowhere.json")
