"""Memory inside operators: measured as it is where that is cheap, extended from smaller calls where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step
from memfit.capture.workspaces import apart, collected, extending, remembered
from memfit.capture.workspaces.apart import measure_apart
from memfit.capture.workspaces.calls import Call, Shape
from memfit.capture.workspaces.measured import Taken, measure
from memfit.capture.workspaces.shrinking import shorter_call, smaller_calls

aten = torch.ops.aten
MIB = 2**20


def call(func: Any, *args: Any) -> Call:
    return Call.of(func, args, {})


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def convolution_backward(channels: int, depth: int, height: int = 64, width: int = 64, stride: int = 1, kernel: int = 3) -> Call:
    image, weight = meta(1, channels, depth, height, width), meta(channels, channels, *(kernel,) * 3)
    out = [(n + 2 - kernel) // stride + 1 for n in (depth, height, width)]
    geometry = ([stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [True] * 3)
    return call(aten.convolution_backward.default, meta(1, channels, *out), image, weight, [channels], *geometry)


def attention(func: Any, tensors: int, mask: torch.Tensor | None = None) -> Call:
    """Of 2 samples of 2 heads over 4096 positions; a backward gets the sums of exponentials as well."""
    sums = [] if tensors == 3 else [meta(2, 4096, 2).transpose(1, 2)]
    return Call.of(func, (*(meta(2, 2, 4096, 64) for _ in range(tensors)), *sums, 0.0, False), {"attn_mask": mask, "scale": 0.125})


LARGE = {
    "convolution backward": convolution_backward(16, 48),
    "strided convolution backward": convolution_backward(16, 49, stride=2),
    "one-channel convolution": call(
        aten.convolution.default, meta(1, 1, 96, 96, 96), meta(16, 1, 3, 3, 3), None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
    ),
    "group norm backward": call(
        aten.native_group_norm_backward.default,
        *(meta(4, 32, 96, 96), meta(4, 32, 96, 96), meta(4, 8), meta(4, 8), meta(32), 4, 32, 96 * 96, 8, [True] * 3),
    ),
    "attention": call(aten._scaled_dot_product_flash_attention_for_cpu.default, *(meta(16, 8, 256, 64) for _ in range(3)), 0.0, True),
    "attention over many positions": attention(aten._scaled_dot_product_flash_attention_for_cpu.default, 3),
    "masked attention's backward": attention(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, 5, mask=meta(1, 1, 4096, 4096)
    ),
    "half-precision product": call(aten.mm.default, meta(8192, 512, dtype=torch.bfloat16), meta(512, 1024, dtype=torch.bfloat16)),
    "layer norm backward": call(
        aten.native_layer_norm_backward.default,
        *(meta(16, 512, 512), meta(16, 512, 512), [512], meta(16, 512, 1), meta(16, 512, 1), meta(512), meta(512), [True] * 3),
    ),
    "loss over a volume": call(
        aten.nll_loss2d_forward.default, meta(1, 4, 1, 500_000), meta(1, 1, 500_000, dtype=torch.long), None, 1, -100
    ),
    "upsampling backward": call(
        aten.upsample_nearest3d_backward.default, meta(1, 32, 64, 64, 32), [64, 64, 32], [1, 32, 32, 32, 16], 2.0, 2.0, 2.0
    ),
}


def told(large: Call, smaller: list[Call]) -> extending.Extended:
    """What smaller calls tell of a larger one."""
    points = [(c, taken) for c, taken in zip(smaller, measure(smaller), strict=True) if taken]
    return extending.extended(large, points, outputs=0)


@pytest.mark.parametrize("name", LARGE)
def test_a_line_through_smaller_calls_tells_the_larger_one(name: str) -> None:
    large = LARGE[name]
    (truth,) = measure([large])
    assert truth is not None
    smaller = smaller_calls(large, min(6 * MIB, large.nbytes // 4))
    assert len(smaller) == 2 and all(c.nbytes < large.nbytes for c in smaller)
    line = told(large, smaller)
    further = collected._measure_all({large.key: large}, {large.key: truth.kept})[large.key] if line.may_bend else line.figures()
    inside, unsure, kept = further
    assert abs(inside - truth.inside) <= 0.02 * truth.inside + 64 * 1024
    assert abs(kept - truth.kept) <= 0.001 * truth.kept
    assert unsure <= 0.02 * inside


def test_attention_is_tried_on_few_positions() -> None:
    """Their square is the work: 65,536 of one head would take minutes, and are no more than 64 MiB."""
    many = Call.of(aten._scaled_dot_product_flash_attention_for_cpu.default, (*(meta(1, 1, 65_536, 64) for _ in range(3)), 0.0, False), {})
    assert [c.args[0].size for c in smaller_calls(many, 12 * MIB)] == [(1, 1, 1024, 64), (1, 1, 2048, 64)]
    shorter, times = shorter_call(many, many.nbytes // 16) or (many, 0.0)
    assert shorter.args[1].size == (1, 1, 4096, 64) and times == 16**2


def made_up(inside: Callable[[int], int], *depths: int) -> list[tuple[Call, Taken]]:
    calls = [convolution_backward(16, depth) for depth in depths]
    return [(c, Taken(inside(c.nbytes), c.nbytes // 2)) for c in calls]


def test_a_bent_line_is_seen_and_followed_further() -> None:
    """Two passes: one takes 7 MB whatever the size, the other a copy of the input, as convolutions do without AVX-512."""
    large, points = convolution_backward(16, 480), partial(made_up, lambda nbytes: max(7_000_000, nbytes // 2))
    truth = large.nbytes // 2
    flat = extending.extended(large, points(6, 12), large.nbytes)
    assert flat.may_bend and flat.inside < 0.1 * truth and truth < flat.inside + flat.unsure
    bent = extending.extended(large, points(24, 32), large.nbytes, flat.points)
    assert bent.may_bend and bent.inside < 0.99 * truth < bent.inside + bent.unsure
    straight = extending.extended(large, points(48, 96), large.nbytes, bent.points)
    assert straight.inside == pytest.approx(truth, rel=1e-3) and not straight.may_bend


def test_a_copy_that_has_just_taken_over_is_known_as_one() -> None:
    """The smaller of two calls still takes the other pass's buffers: their line would end below what a copy of the input takes."""

    def taken(nbytes: int) -> Taken:
        """The weights' gradient, 27,648 and 64 bytes here, is made only when the copy is there."""
        copy = (nbytes - 27_648) // 2
        return Taken(max(2_000_000, copy - 27_712), copy + 27_712)

    large = convolution_backward(16, 480)
    points = [(c, taken(c.nbytes)) for c in (convolution_backward(16, depth) for depth in (6, 12))]
    assert points[0][1].inside == 2_000_000 < points[1][1].inside
    found = extending.extended(large, points, large.nbytes)
    assert found.inside == taken(large.nbytes).inside and not found.may_bend and found.unsure <= 0.021 * found.inside
    blunted = [points[0], (points[1][0], Taken(points[1][1].inside + 100_000, points[1][1].kept))]  # no copy: nothing is known of it
    assert extending.extended(large, blunted, large.nbytes).may_bend


def test_a_constant_part_that_larger_calls_confirm_is_no_bend() -> None:
    large, points = convolution_backward(16, 480), partial(made_up, lambda nbytes: 3_000_000 + nbytes)
    first = extending.extended(large, points(6, 12), large.nbytes)
    second = extending.extended(large, points(16, 32), large.nbytes, first.points)
    assert first.may_bend and not second.may_bend and second.inside == pytest.approx(3_000_000 + large.nbytes)


def test_the_line_must_not_cross_to_another_kernel() -> None:
    """A lone small volume takes another way through torch than a large one; a line that starts there is far off."""
    large = convolution_backward(16, 48)
    (truth,) = measure([large])
    assert truth is not None
    assert told(large, [convolution_backward(16, depth) for depth in (4, 8)]).inside > 5 * truth.inside
    assert all(c.args[1].size[2] * 16 * 64 > 20_480 for c in smaller_calls(large, 6 * MIB))


def test_a_call_that_cannot_shrink_is_run_as_it_is_or_is_unsure() -> None:
    weights = call(aten.convolution.default, meta(1, 256, 3, 3), meta(1536, 256, 3, 3), None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1)
    assert weights.nbytes > extending.LIMITS[0] and extending.trials_of(weights, 0, extending.LIMITS[0]) == [weights]
    assert extending.extended(weights, [], 0).figures() == [0.0, 2.0 * weights.nbytes, 0.0]


def test_a_large_volume_is_tried_on_a_slab_above_the_usual_size() -> None:
    """The thinnest slab of 256×256×64 that is still alike is 24 MiB: not worth being unsure by twice the volume."""
    kernel, plain = meta(32, 32, 3, 3, 3), ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    large = call(aten.convolution.default, meta(1, 32, 256, 256, 64), kernel, None, *plain)
    assert smaller_calls(large, extending.LIMITS[0] // 2) == []
    trials = extending.trials_of(large, large.nbytes, extending.LIMITS[0])
    assert len(trials) == 2 and all(trial.nbytes < extending.LIMITS[-1] for trial in trials)


def test_an_output_that_holds_more_than_it_shows() -> None:
    (taken,) = measure([call(aten.mse_loss.default, meta(64, 64), meta(64, 64))])
    assert taken is not None and taken.kept == 64 * 64 * 4


def test_a_call_that_fails_on_zeros_is_not_measured() -> None:
    assert measure([call(aten.mm.default, meta(2, 3), meta(4, 5))]) == [None]


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(1, 9))
def test_a_resized_shape_keeps_the_order_of_its_dimensions(order: list[int], dim: int, length: int) -> None:
    tensor = torch.empty(2, 3, 4, 5).permute(order)
    resized = Shape.of(tensor).resized(dim, length)
    made = resized.make()
    assert made.shape[dim] == length and made.stride() == resized.stride
    assert made.untyped_storage().nbytes() == made.numel() * 4  # dense, like the original
    assert Shape.of(tensor).resized(dim, tensor.shape[dim]).size == tuple(tensor.shape)


def test_signatures_tell_layouts_apart() -> None:
    plain = torch.empty(2, 3, 4, 4)
    keys = {call(aten.relu.default, t).key for t in (plain, plain.to(memory_format=torch.channels_last), plain.half(), plain[:1])}
    assert len(keys) == 4


def test_what_was_measured_is_remembered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 3, 32, 32))
    told: list[str] = []
    first = memfit.profile(step, simulate=True, progress=told.append)
    again: list[str] = []
    second = memfit.profile(step, simulate=True, progress=again.append)
    assert any("measuring the workspaces" in words for words in told) and not any("measuring" in words for words in again)
    assert first.peak_bytes == second.peak_bytes
    (file,) = tmp_path.iterdir()
    assert torch.__version__ in file.name and f"{torch.get_num_threads()}threads" in file.name
    file.write_text("damaged")
    assert memfit.profile(step, simulate=True).peak_bytes == first.peak_bytes


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", "/dev/null/nowhere")
    known = remembered.Remembered()
    known.put({"a call": [1.0, 0.0, 0.0]})
    assert known.get("a call") == [1.0, 0.0, 0.0]


def test_made_up_calls_are_measured_elsewhere_with_the_same_result() -> None:
    good, fails = call(aten.mse_loss.default, meta(64, 64), meta(64, 64)), call(aten.mm.default, meta(2, 3), meta(4, 5))
    assert measure_apart([good, fails, LARGE["layer norm backward"]]) == measure([good, fails, LARGE["layer norm backward"]])


BAD_OPERATORS = """
import os, time, torch
library = torch.library.Library("bad", "DEF")
library.define("dies(Tensor x) -> Tensor")
library.define("hangs(Tensor x) -> Tensor")
library.impl("dies", lambda x: os.abort(), "CPU")
library.impl("hangs", lambda x: time.sleep(600), "CPU")
"""


@pytest.mark.parametrize("name", ["dies", "hangs"])
def test_a_call_that_never_comes_back_is_found_and_the_others_count(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BAD_OPERATORS)  # the process apart has operators that do it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(apart, "_MOST_SECONDS", 20.0)
    started: list[int] = []
    real = apart._told_by_a_process
    monkeypatch.setattr(apart, "_told_by_a_process", lambda calls: started.append(len(calls)) or real(calls))
    library = torch.library.Library("bad", "FRAGMENT")  # here it only needs its name
    library.define(f"{name}(Tensor x) -> Tensor")
    good = [call(aten.mse_loss.default, meta(n, n), meta(n, n)) for n in (64, 32, 16)]
    bad = call(getattr(torch.ops.bad, name).default, meta(3, 3))
    assert measure_apart([*good[:2], bad, good[2]]) == [*measure(good[:2]), None, *measure(good[2:])]
    assert started == [4, 2, 1]
