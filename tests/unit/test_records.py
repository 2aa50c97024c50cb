from __future__ import annotations

import json
from pathlib import Path

import pytest

import memfit
from memfit import Ledger
from memfit.errors import RecordError
from memfit.records import CATEGORIES, EXACTNESS, Plan, Trace
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
        ('{"schema": "memfit.profile/1"}', "make it again with memfit profile TARGET --simulate --json > FILE"),
        ('{"schema": "memfit.profile/\u00b2"}', "This is not a memfit.profile record"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_unreadable_records_say_why(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match=words):
        Ledger.load(tmp_path / "record.json")


def test_a_missing_record_says_how_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nowhere\.json cannot be read: No such file or directory\. Make it with memfit profile TARGET"):
        Ledger.load(tmp_path / "nowhere.json")
    with pytest.raises(RecordError, match=r"Make it with memfit plan TARGET --budget BYTES -o FILE\."):
        Plan.load(tmp_path / "nowhere.json")


def test_a_plan_that_knows_too_little_of_its_step_is_refused_with_the_way_out() -> None:
    earlier = Plan(True, 1, 1, 1, 1, "bitwise", ()).to_dict() | {"schema": "memfit.plan/1"}
    with pytest.raises(RecordError, match=r"an earlier memfit's and lacks what is needed now: make it again with memfit plan TARGET"):
        Plan.from_dict(earlier)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"levers": "abc"}, "levers is 'abc'"),
        ({"levers": ["abc"]}, "levers is 'abc'"),
        ({"levers": [{"name": 3, "option": "", "exactness": "bitwise"}]}, "name is 3"),
        ({"step": ["torch"]}, r"step is \['torch'\]"),
        ({"budget_bytes": "much"}, "budget_bytes is 'much'"),
        ({"predicted_peak_bytes": None}, "predicted_peak_bytes is None"),
        ({"budget_bytes": True}, "budget_bytes is True"),
        ({"exactness": {}}, "exactness is {}"),
    ],
)
def test_a_damaged_plan_says_where_and_how_it_is_made_again(damage: dict[str, object], words: str) -> None:
    whole = Plan(True, 1, 1, 1, 1, "bitwise", ()).to_dict()
    assert Plan.from_dict(whole).feasible
    with pytest.raises(RecordError, match=f"This Plan is damaged: {words}.*make it again with memfit plan TARGET --budget BYTES -o FILE"):
        Plan.from_dict(whole | damage)


def test_a_damaged_profile_says_so() -> None:
    whole = memfit.profile(two_phases(), simulate=True).to_dict()
    for name in ("by_module", "at_peak", "process", "timeline"):
        with pytest.raises(RecordError, match=f"This Ledger is damaged: {name} is 'x'"):
            Ledger.from_dict(whole | {name: "x"})


def test_what_a_plan_could_reach_is_said_of_every_class_also_by_an_old_file() -> None:
    old = Plan(True, 1, 1, 1, 1, "bitwise", ()).to_dict() | {"reachable_bytes": {"bitwise": 7, "reordered": 5}}
    plan = Plan.from_dict(old)
    assert plan.reachable_bytes == {"bitwise": 7, "reordered": 5, "redrawn": None, "rounded": None, "altered": None}
    assert tuple(plan.to_dict()["reachable_bytes"]) == EXACTNESS and Plan.from_dict(plan.to_dict()) == plan


def test_what_says_that_nothing_fits_is_no_plan() -> None:
    none = Plan(False, 1, 0, 5, None, "bitwise", ()).to_dict() | {"predicted_peak_bytes": None, "exactness": None}
    with pytest.raises(RecordError, match="says that nothing fits its budget, so there is nothing to apply: plan again with a larger one"):
        Plan.from_dict(none)
