"""The verdict's screen, word for word. UPDATE_GOLDENS=1 writes the files anew; read the difference before you keep it."""

from __future__ import annotations

import importlib.metadata
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from memfit.records import Verdict, Worst
from memfit.report.terminal import print_verdict

PINNED_RICH = "15.0.0"  # another version may draw differently, so it may not write the files
COMPARED = {"gradients": 24, "buffers": 6, "rng": 3, "optimizer_state": 72, "parameters": 24}


def bitwise() -> Verdict:
    losses = ({"loss": 0.693147182}, {"loss": 0.681203008}, {"loss": 0.669001997})
    trajectory = {"reference": losses, "fitted": losses}
    loss = {"reference": 0.693147182, "fitted": 0.693147182}
    return Verdict(True, "bitwise", loss, Worst("the gradient of 0.weight", 0.0, 0.0), COMPARED, ("saved",), "", trajectory, (), 1.5)


def wrong() -> Verdict:
    plain = ({"generator": 1.25, "critic": -0.125}, {"generator": 1.125, "critic": -0.25}, {"generator": 1.0, "critic": -0.375})
    fitted = ({"generator": 1.25, "critic": -0.125}, {"generator": 1.1250001, "critic": -0.25}, {"generator": 0.9, "critic": None})
    worst = Worst("the gradient of generator.decoder.up_blocks.3.resnets.0.norm1.weight in generator", 0.0312, 4.1e-07)
    notes = ("There was no float64 run to compare with: it raised TypeError: this kernel takes float32. Gradients were held to less.",)
    trajectory = {"reference": plain, "fitted": fitted}
    levers = ("saved", "microbatch", "optimizer")
    return Verdict(False, "reordered", {}, worst, COMPARED, levers, "microbatch", trajectory, notes, 42.0)


def raised() -> Verdict:
    worst = Worst("the fitted step raised RuntimeError: [bold] a saved tensor was lost", None, 0.0)
    return Verdict(False, "bitwise", {}, worst, {}, ("saved",), "saved", {"reference": ({"loss": 1.0},), "fitted": ()}, (), 1.0)


def screen(verdict: Verdict, width: int = 80) -> str:
    out = io.StringIO()
    print_verdict(verdict, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize(("name", "verdict"), [("verdict_yes", bitwise()), ("verdict_no", wrong()), ("verdict_raised", raised())])
def test_screen_is_the_golden_one(name: str, verdict: Verdict) -> None:
    golden = Path(__file__).with_name(f"{name}.txt")
    shown = screen(verdict)
    if os.environ.get("UPDATE_GOLDENS") == "1":
        assert importlib.metadata.version("rich") == PINNED_RICH, f"goldens are written with rich {PINNED_RICH} only"
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [200, 80, 60, 44])
@pytest.mark.parametrize("verdict", [bitwise(), wrong(), raised()], ids=["yes", "no", "raised"])
def test_no_line_is_wider_than_the_terminal_or_80_columns(verdict: Verdict, width: int) -> None:
    lines = screen(verdict, width).splitlines()
    assert max(cell_len(line) for line in lines) <= min(width, 80)
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("exactness", "by_design", "words"),
    [
        ("altered", True, "The fitted step is not the same training, by design."),
        ("altered", False, "The fitted step was to be another training, and it cannot be run."),
        ("redrawn", True, "The fitted step is the same training in distribution only."),
        ("redrawn", False, "The fitted step is not the same training, not even in distribution."),
    ],
)
def test_what_cannot_be_equivalent_is_said_to_be_so(exactness: str, by_design: bool, words: str) -> None:
    shown = screen(replace(bitwise(), equivalent=False, exactness=exactness, by_design=by_design))
    assert "Not equivalent\n" in shown and words in shown
