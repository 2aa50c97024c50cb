from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from memfit.records import Finding, Ledger, Owner, Process, Stretch
from memfit.report.profile_view import Chart, chart_of, op_word, percent, profile_view
from memfit.units import format_bytes

MIB = 2**20


def ledger(owners: tuple[Owner, ...] = (), **changes: object) -> Ledger:
    by_category: dict[str, int] = {}
    for owner in owners:
        by_category[owner.category] = by_category.get(owner.category, 0) + owner.bytes
    peak = sum(by_category.values())
    plain = Ledger(peak, peak, False, peak, peak, peak, peak, 0.5, "cpu", 4, by_category, {}, {}, {}, owners, (), Process(0), 0, (), (), ())
    return replace(plain, **changes)  # type: ignore[arg-type]


def activation(size: int, op: str = "aten.silu.default", module: str = "net", source: str = "a.py:1") -> Owner:
    return Owner(size, "activations", op, module, source)


def test_owners_of_one_op_in_one_place_are_one_row_and_the_largest_comes_first() -> None:
    view = profile_view(ledger((activation(5, source="b.py:2"), activation(3), activation(4))))
    assert [(row.bytes, row.count, row.source) for row in view.owners] == [(7, 2, "a.py:1"), (5, 1, "b.py:2")]


def test_layers_that_are_alike_are_told_once() -> None:
    view = profile_view(ledger(tuple(activation(8, module=f"h.{n}.attn") for n in range(3))))
    assert [(row.bytes, row.count, row.module) for row in view.owners] == [(24, 3, "h.*.attn")]


@pytest.mark.parametrize(
    "other",
    [
        activation(9, module="h.1.attn"),
        activation(8, module="h.1.mlp"),
        activation(8, op="aten.mm.default", module="h.1.attn"),
        activation(8, module="h.1.attn", source="b.py:2"),
        replace(activation(8, module="h.1.attn"), category="temporaries"),
    ],
    ids=["size", "name", "op", "line", "category"],
)
def test_layers_that_differ_are_kept_apart(other: Owner) -> None:
    view = profile_view(ledger((activation(8, module="h.0.attn"), other)))
    assert {row.module for row in view.owners} == {"h.0.attn", other.module}


def test_a_digit_inside_a_name_is_no_layer_number() -> None:
    view = profile_view(ledger((activation(8, module="block.norm1"), activation(8, module="block.norm2"))))
    assert [row.module for row in view.owners] == ["block.norm1", "block.norm2"]


def test_what_is_left_out_is_counted() -> None:
    view = profile_view(ledger(tuple(activation(100 - n, source=f"a.py:{n}") for n in range(11))))
    assert len(view.owners) == 8
    assert view.other_owners == "and 3 smaller owners, 273 B in all"
    assert sum(row.bytes for row in view.owners) + 273 == sum(100 - n for n in range(11))


def test_bars_fall_in_size_skip_empty_categories_and_add_up() -> None:
    owners = (activation(75), Owner(25, "batch", "", "batch", ""))
    view = profile_view(ledger(owners, by_category={"batch": 25, "other": 0, "activations": 75}))
    assert [(bar.category, bar.share) for bar in view.bars] == [("activations", 0.75), ("batch", 0.25)]


def test_a_measured_peak_names_its_instrument_and_no_interval() -> None:
    view = profile_view(ledger((activation(MIB),)))
    assert view.peak.how == "measured by torch's allocator events"
    assert view.setting == "cpu · batch of 4 · 500 ms a step"


def test_a_predicted_peak_has_its_interval_and_is_never_called_measured() -> None:
    changes = {"predicted": True, "low_bytes": MIB, "high_bytes": 3 * MIB, "process_low_bytes": 2 * MIB, "process_high_bytes": 4 * MIB}
    view = profile_view(ledger((activation(2 * MIB),), step_seconds=None, **changes))
    assert view.peak.how == f"predicted, interval [{format_bytes(MIB)}, {format_bytes(3 * MIB)}]"
    assert view.process.how == f"predicted, interval [{format_bytes(2 * MIB)}, {format_bytes(4 * MIB)}]"
    assert "measured" not in view.peak.how + view.process.how
    assert view.setting.endswith("simulated")


def test_a_process_that_nobody_measured_is_predicted_even_beside_a_measured_peak() -> None:
    view = profile_view(ledger((activation(MIB),), process=Process(0, measured_bytes=None)))
    assert "measured" in view.peak.how and "predicted" in view.process.how
    view = profile_view(ledger((activation(MIB),), process=Process(0, measured_bytes=MIB)))
    assert view.process.how == "measured by the system's high-water mark"


@pytest.mark.parametrize(
    ("process_bytes", "process", "words"),
    [
        (
            600 * MIB,
            Process(300 * MIB, workers_bytes=50 * MIB, workers=1),
            "base 300 MiB + peak 200 MiB + slack 50.0 MiB + 1 worker 50.0 MiB",
        ),
        (500 * MIB, Process(300 * MIB), "base 300 MiB + peak 200 MiB + slack 0 B"),
        (480 * MIB, Process(300 * MIB), "base 300 MiB + peak 200 MiB - 20.0 MiB never resident"),
    ],
)
def test_the_parts_of_the_process_add_up(process_bytes: int, process: Process, words: str) -> None:
    view = profile_view(ledger((activation(200 * MIB),), process_bytes=process_bytes, process=process))
    assert view.process_parts == words


def test_the_largest_finding_comes_first_and_one_without_a_place_shows_its_kind() -> None:
    findings = (Finding("small_thing", 1, "", "why", ""), Finding("big", 9, "a.py:1", "why", "recompute"))
    assert [(f.bytes, f.where) for f in profile_view(ledger(findings=findings)).findings] == [(9, "a.py:1"), (1, "small thing")]


def test_findings_beyond_six_are_counted() -> None:
    view = profile_view(ledger(findings=tuple(Finding("kind", n, f"a.py:{n}", "why", "") for n in range(8))))
    assert (len(view.findings), view.other_findings) == (6, "and 2 smaller findings, 1 B in all")


@pytest.mark.parametrize(
    ("stretch", "words"),
    [
        (Stretch("backward", "critic", 0, 0), "backward of critic"),
        (Stretch("forward", "", 0, 0), "forward"),
        (Stretch("optimizer", "", 0, 0), "the optimizer's step"),
    ],
)
def test_the_peak_has_a_phase(stretch: Stretch, words: str) -> None:
    assert profile_view(ledger(timeline=(1,), stretches=(stretch,))).peak_phase == words


def chart(timeline: list[int], lengths: tuple[int, ...], columns: int) -> Chart:
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    stretches = tuple(Stretch(f"phase{n}", "", first, end - 1) for n, (first, end) in enumerate(pairwise(ends)))
    made = chart_of(ledger(timeline=tuple(timeline), stretches=stretches, peak_bytes=max(timeline)), columns)
    assert made is not None
    return made


@pytest.mark.parametrize("ops", [1, 3, 69, 70, 71, 5000])
def test_a_chart_has_its_columns_and_keeps_the_peak(ops: int) -> None:
    line = [op % 7 for op in range(ops)]
    line[ops // 2] = 100
    made = chart(line, (ops,), 70)
    assert len(made.columns) == 70 and max(made.columns) == 100 == made.columns[made.peak_column]


def test_a_thousand_quiet_ops_do_not_push_the_others_aside() -> None:
    made = chart([*range(50), *([50] * 1000)], (50, 1000), 70)
    assert [(span.first, span.last) for span in made.spans] == [(0, 62), (63, 69)]
    assert made.columns[62] == 49 and set(made.columns[63:]) == {50}


def test_more_phases_than_columns_still_make_a_chart_of_that_width() -> None:
    made = chart(list(range(1, 101)), (1,) * 100, 70)
    assert len(made.columns) == 70 and len(made.spans) == 70


def test_no_time_line_no_chart_and_no_phases_one_span() -> None:
    assert chart_of(ledger(), 70) is None
    made = chart_of(ledger(timeline=(0, 0)), 10)
    assert made is not None and len(made.spans) == 1 and made.columns == (0,) * 10 and made.top == 1


def test_ops_and_shares_in_words() -> None:
    assert op_word("aten.add.Tensor") == "add" and op_word("mylib.scan") == "mylib.scan"
    assert [percent(share) for share in (1, 0.0005, 0.0004, 0)] == ["100.0 %", "0.1 %", "<0.1 %", "0.0 %"]
