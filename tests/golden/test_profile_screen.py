"""The profile's screen, word for word. UPDATE_GOLDENS=1 writes the files anew; read the difference before you keep it."""

from __future__ import annotations

import importlib.metadata
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from ledgers import empty, measured, predicted
from rich.cells import cell_len
from rich.console import Console

from memfit.records import Ledger, Owner
from memfit.report.terminal import print_profile
from memfit.units import format_bytes

PINNED_RICH = "15.0.0"  # another version may draw differently, so it may not write the files


def screen(ledger: Ledger, width: int = 80, **how: object) -> str:
    out = io.StringIO()
    print_profile(ledger, Console(file=out, width=width, **how))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize(("name", "ledger"), [("profile_measured", measured()), ("profile_predicted", predicted())])
def test_screen_is_the_golden_one(name: str, ledger: Ledger) -> None:
    golden = Path(__file__).with_name(f"{name}.txt")
    shown = screen(ledger)
    if os.environ.get("UPDATE_GOLDENS") == "1":
        assert importlib.metadata.version("rich") == PINNED_RICH, f"goldens are written with rich {PINNED_RICH} only"
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


def test_a_colourful_terminal_shows_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = screen(measured(), force_terminal=True, color_system="standard")
    assert "\x1b[35m" in coloured  # activations are magenta
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard", record=True)
    print_profile(measured(), console)
    assert console.export_text() == screen(measured())


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in screen(measured(), force_terminal=True, color_system="standard")


def test_output_that_is_piped_has_no_control_characters() -> None:
    assert "\x1b" not in screen(measured())


@pytest.mark.parametrize("width", [200, 80, 60, 44])
@pytest.mark.parametrize("ledger", [measured(), predicted(), empty()], ids=["measured", "predicted", "empty"])
def test_no_line_is_wider_than_the_terminal_or_80_columns(ledger: Ledger, width: int) -> None:
    lines = screen(ledger, width).splitlines()
    assert max(cell_len(line) for line in lines) <= min(width, 80)
    assert not any(line != line.rstrip() for line in lines)


def test_names_of_any_length_and_script_fit() -> None:
    module = "encoder." + "block_with_a_very_long_name." * 9 + "conv"
    op, source = f"mylib.{'操作' * 9}.default", "训练/" * 30 + "模型.py:7"
    shown = screen(replace(measured(), at_peak=(Owner(measured().peak_bytes, "activations", op, module, source),)))
    assert "…" in shown and ".conv" in shown and "模型.py:7" in shown
    assert max(cell_len(line) for line in shown.splitlines()) <= 80


def test_words_in_brackets_are_not_taken_for_markup() -> None:
    owner = Owner(measured().peak_bytes, "batch", "", "batch[bold]", "[red]file.py:1")
    shown = screen(replace(measured(), at_peak=(owner,)))
    assert "batch[bold]" in shown and "[red]file.py:1" in shown


def test_a_step_that_took_nothing_says_so() -> None:
    shown = screen(empty())
    assert "0 B  the step took no memory" in shown
    assert "Who holds it" not in shown and "What stands out" not in shown and "Memory over the step" not in shown


def test_an_interval_survives_a_narrow_terminal() -> None:
    ledger = predicted()
    assert f"[{format_bytes(ledger.low_bytes)}, {format_bytes(ledger.high_bytes)}]" in " ".join(screen(ledger, 44).split())
