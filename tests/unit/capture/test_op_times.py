"""Seconds of operators: timed once, remembered, bounded; a call that dies costs nobody else's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.capture import capture, op_times
from memfit.capture.clock import seconds_of
from memfit.capture.op_times import OpCalls, timed
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.shrinking import shorter_call
from memfit.records import Trace
from small_steps import convolutional_3d, dense

aten = torch.ops.aten


def call(func: Any, *args: Any, **kwargs: Any) -> Call:
    return Call.of(func, args, kwargs)


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def captured(step: Any, device: str | None = None) -> tuple[Trace, OpCalls]:
    calls = OpCalls()
    return capture(step, True, device, calls=calls), calls


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(op_times, "_GIVEN_UP", set())
    return tmp_path


def test_every_op_but_views_is_timed_once_and_remembered(empty_cache: Path) -> None:
    trace, calls = captured(convolutional_3d())
    told: list[str] = []
    first = timed(trace, calls, [1e-4] * len(trace.ops), told.append)
    names = {op.name for op in first.ops if op.seconds is None}
    assert all(op.seconds > 0 for op in first.ops if op.seconds is not None) and "aten.convolution.default" not in names
    assert names <= {f"aten.{word}.default" for word in ("view", "detach", "t", "expand", "alias", "lift_fresh")}
    assert told[0].startswith("timing ") and told[0].endswith("kinds of ops, once for this machine") and "timing ops, 1 of" in told[1]
    (file,) = empty_cache.glob("times-*")
    assert torch.__version__ in file.name and f"{torch.get_num_threads()}threads" in file.name
    again: list[str] = []
    assert timed(trace, calls, [1e-4] * len(trace.ops), again.append) == first and not again


def test_what_there_was_no_time_for_is_left_out_and_stays_so(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_times, "_MOST_SECONDS", 1e-9)
    trace, calls = captured(dense())
    estimates = [1e-5] * len(trace.ops)
    dear = next(number for number, op in enumerate(trace.ops) if op.name == "aten.addmm.default")
    estimates[dear] = 0.1
    first = timed(trace, calls, estimates, lambda words: None)
    assert [number for number, op in enumerate(first.ops) if op.seconds is not None] == [dear]  # the dearest comes first
    monkeypatch.undo()
    assert all(op.seconds is None for op in timed(*captured(dense(), "cuda"), estimates, lambda words: None).ops)


def test_a_call_that_brings_its_process_down_is_the_only_one_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Path(op_times.__file__).with_name("clock.py").read_text()
    dies = "    'tanh' in name and __import__('os')._exit(9)\n    args, kwargs = _made(args)"
    (tmp_path / "clock.py").write_text(script.replace("    args, kwargs = _made(args)", dies))
    monkeypatch.setattr(op_times, "__file__", str(tmp_path / "op_times.py"))
    x = meta(64, 64)
    trials = {word: (call(func, x), 1.0) for word, func in {"a": aten.sin.default, "b": aten.tanh.default, "c": aten.cos.default}.items()}
    found = dict(op_times._timed_apart(trials, lambda words: None))
    assert found["b"] == [] and found["a"][0] > 0 and found["c"][0] > 0


def test_a_call_that_will_not_run_on_made_up_values_is_not_timed() -> None:
    assert seconds_of(*call(aten.mm.default, meta(2, 3), meta(4, 5)).plain()) is None
    taken = seconds_of(*call(aten.index_select.default, meta(5, 3), 0, meta(4, dtype=torch.int64)).plain())
    assert taken is not None and 0 < taken[0] <= taken[1]


def test_a_large_call_is_timed_on_less_of_it() -> None:
    product = call(aten.mm.default, meta(8192, 512), meta(512, 256))
    found = shorter_call(product, product.nbytes // 4)
    assert found is not None and found[0].args[0].size[0] < 8192 and found[1] == 8192 / found[0].args[0].size[0]
    small, times = op_times._trial(product, 10.0, 8192 * 256 * 4)
    assert small.nbytes < product.nbytes and times > 2
    assert op_times._trial(product, 0.01, 8192 * 256 * 4) == (product, 1.0)
    of_lists = call(aten._foreach_add_.Scalar, [meta(1024, 64) for _ in range(9)], 1.0)
    found = shorter_call(of_lists, of_lists.nbytes // 20)
    assert found is not None and found[1] == of_lists.nbytes / found[0].nbytes


def test_the_clock_tells_long_calls_from_short_ones() -> None:
    def taken(n: int) -> float:
        return (seconds_of(*call(aten.mm.default, meta(n, n), meta(n, n)).plain()) or (0.0, 0.0))[0]

    started = time.perf_counter()
    short, long = taken(32), taken(512)
    assert 0 < 10 * short < long < time.perf_counter() - started
