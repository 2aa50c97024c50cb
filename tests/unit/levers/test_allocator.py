from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from fresh_process import in_a_fresh_process
from lever_law import differences, furniture, made, simulated, state_after
from memfit import Ledger, Step
from memfit.levers import LEVERS, CannotApply
from memfit.levers.allocator_holes import HolesGivenBack
from memfit.levers.settings import damage_in
from memfit.records import Option, Process

LEVER = LEVERS["allocator"]
MIB = 2**20
PINNED = Option("allocator", "1 MiB and more given back at once", "bitwise", {"threshold": MIB})
HOLES = Option("allocator", "holes given back", "bitwise", {"holes": 1 / 16})
TRIMMED = Option("allocator", "trimmed after each step", "bitwise", {"trim": True})
linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc's own calls")


def wide() -> Step:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2048, 256))


KEPT = """
import ctypes, json, psutil
from memfit.levers import LEVERS
from memfit.records import Option
{change}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def filled(size):
    block = libc.malloc(size); ctypes.memset(block, 1, size); return block
libc.free(filled(24 << 20))  # glibc now takes this for an everyday size
before = psutil.Process().memory_info().rss
blocks = [filled(4 << 20) for _ in range(20)]
last = filled(4 << 20)  # no hole of the program's own is as large: it keeps the others from the top of the heap
for block in blocks: libc.free(block)
print(json.dumps((psutil.Process().memory_info().rss - before) >> 20))
"""


@linux
def test_pinned_thresholds_give_freed_memory_back() -> None:
    change = "LEVERS['allocator'].apply(None, Option('allocator', '', 'bitwise', {'threshold': 2**20}))"
    assert in_a_fresh_process(KEPT.format(change=change)) < 10
    assert in_a_fresh_process(KEPT.format(change="")) > 60  # what happens without
    undone = in_a_fresh_process(KEPT.format(change=change + "()"))
    assert undone > 40
    users_own = "import os; os.environ['MALLOC_MMAP_THRESHOLD_'] = os.environ['MALLOC_TRIM_THRESHOLD_'] = '1048576'; "
    assert in_a_fresh_process(KEPT.format(change=users_own + change + "()")) < 10


LAW = """
import json, memfit
from unit.levers.test_allocator import *
step = made(wide)
before = simulated(step)
predicted = LEVER.rewrite(before, PINNED)
with LEVER.apply(step, PINNED):
    after = simulated(step)
print(json.dumps([(l.peak_bytes, l.process_bytes, l.process.slack_low_bytes, l.process.slack_bytes, l.process.slack_high_bytes)
    for l in (before, predicted, after)]))
"""


@linux
def test_the_law() -> None:
    """Children inherit the thresholds, and the replay that predicts the slack is one: a fresh profile shows what the lever does."""
    before, predicted, after = in_a_fresh_process(LAW)
    assert before[0] == predicted[0] == after[0]
    assert abs(predicted[3] - after[3]) < 0.02 * after[1]
    assert predicted[2] <= after[3] <= predicted[4] < before[4]


SCATTERED = """
import ctypes, json, time, psutil
from memfit.levers.allocator_holes import HolesGivenBack
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def filled(size):
    block = libc.malloc(size); ctypes.memset(block, 1, size); return block
libc.free(filled(24 << 20))
given_back = HolesGivenBack(1 / 16)
before = psutil.Process().memory_info().rss
blocks = [filled(4 << 20) for _ in range(80)]
{looked_at_the_most}
for block in blocks[1::2]: libc.free(block)
time.sleep(0.01)  # a look so soon after another would not look
given_back.look()
print(json.dumps((psutil.Process().memory_info().rss - before) >> 20))
"""


@linux
def test_holes_are_given_back_beyond_what_was_once_in_use() -> None:
    """80 blocks of 4 MiB, every second one free again: 160 MiB that nobody uses, in pieces."""
    assert in_a_fresh_process(SCATTERED.format(looked_at_the_most="")) < 180
    assert in_a_fresh_process(SCATTERED.format(looked_at_the_most="given_back.look()")) > 300  # all of it was needed once: pages cost


@linux
def test_holes_the_law_and_the_same_training() -> None:
    step = made(wide)
    before, plain = furniture(step), simulated(step)
    predicted = LEVER.rewrite(plain, HOLES)
    with LEVER.apply(step, HOLES):
        after, changed = simulated(step), state_after(step)
    assert furniture(step) == before
    assert differences(state_after(made(wide)), changed) == []
    assert predicted.peak_bytes == after.peak_bytes == plain.peak_bytes
    assert abs(predicted.process.slack_high_bytes - after.process.slack_high_bytes) < MIB
    assert predicted.process_high_bytes <= plain.process_high_bytes


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.inner(x)}


@linux
def test_holes_are_looked_for_at_each_call_and_where_its_gradient_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[int]()
    monkeypatch.setattr(HolesGivenBack, "look", lambda self, *_: looks.append(1))
    net = Seen()
    step = Step(net, lambda m, x: m(x)["out"].mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 8))
    with LEVER.apply(step, HOLES):
        step.run(step.batch)
        assert len(looks) == 2 * 2 + 1 + 2  # before and after both calls, after the loss, both calls again in backward
        del looks[:]
        net(step.batch)
        assert not looks  # nothing stays on modules outside the loss


@linux
def test_after_an_exception_no_look_is_left() -> None:
    step = Step(net := nn.Linear(2, 2), lambda m, x: m(x).mean() + 1 / 0, torch.optim.SGD(net.parameters(), 0.1), torch.ones(1, 2))
    with LEVER.apply(step, HOLES), pytest.raises(ZeroDivisionError):
        step.run(step.batch)
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks


HELD = """
import json, memfit
from memfit.capture.process import HighWaterMark
from unit.levers.test_allocator import *
step = made(scattering)
ledger = simulated(step)
predicted = LEVER.rewrite(ledger, HOLES)
{change}
with HighWaterMark() as mark:
    for _ in range(8):
        step.run(step.batch)
print(json.dumps([mark.bytes, predicted.process_high_bytes, ledger.process_high_bytes]))
"""


def scattering() -> Step:
    """Blocks of many sizes, kept in another order than they are freed."""
    layers = (nn.TransformerEncoderLayer(192, 4, 8 * width, 0.1, batch_first=True) for width in (48, 80, 112, 144, 176, 208))
    net = nn.Sequential(*layers)
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(16, 160, 192))


@linux
def test_with_holes_given_back_a_process_stays_inside_what_is_promised() -> None:
    plain, promised, unsure = in_a_fresh_process(HELD.format(change=""))
    held, _, _ = in_a_fresh_process(HELD.format(change="undo = LEVER.apply(step, HOLES)"))
    assert held <= promised < unsure
    assert promised < plain  # it would not have stayed there by itself


def test_trimming_keeps_the_upper_end() -> None:
    """What trimming spares was seen, how much it must spare was not: a plan may not count on it."""
    before = simulated(made(wide))
    after = LEVER.rewrite(before, TRIMMED)
    assert (after.peak_bytes, after.process_high_bytes) == (before.peak_bytes, before.process_high_bytes)
    assert after.process_bytes <= before.process_bytes


def test_a_measured_ledger_becomes_a_predicted_one() -> None:
    before = simulated(made(wide))
    assert before.trace is not None
    seen = Process(100 * MIB, measured_bytes=140 * MIB + before.peak_bytes)
    measured = replace(before, trace=replace(before.trace, process=seen))
    after = LEVER.rewrite(measured, PINNED)
    assert after.process.measured_bytes is None
    assert after.process_bytes <= 140 * MIB + before.peak_bytes


@linux
def test_trimming_happens_after_every_step_and_is_undone() -> None:
    step = made(wide)
    before = furniture(step)
    undo = LEVER.apply(step, TRIMMED)
    assert len(step.running.after_step) == 1
    called: list[int] = []
    step.running.after_step.append(lambda: called.append(1))
    changed = state_after(step)
    assert len(called) == 3
    step.running.after_step.pop()
    undo()
    assert furniture(step) == before
    assert differences(state_after(made(wide)), changed) == []


@linux
def test_another_malloc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    with pytest.raises(CannotApply) as caught:
        LEVER.apply(made(wide), TRIMMED)
    assert str(caught.value) == (
        "jemalloc is in use, and malloc_trim is glibc's own: set the allocator up by its own variables, or leave this lever out."
    )


def test_cuda_settings_are_refused_where_they_would_do_nothing() -> None:
    ledger = simulated(made(wide))
    options = LEVER.options(on("cuda", ledger))
    assert [o.name for o in options] == ["expandable_segments:True", "max_split_size_mb:128"]
    variables = dict(os.environ)
    with pytest.raises(CannotApply, match=r"no CUDA device here|counts only before"):
        LEVER.apply(made(wide), options[0])
    assert dict(os.environ) == variables
    assert LEVER.rewrite(ledger, options[0]).process_bytes == ledger.process_bytes  # nothing promised


def test_mps_empties_its_cache() -> None:
    step = made(wide)
    (option,) = LEVER.options(on("mps", simulated(step)))
    with LEVER.apply(step, option):
        assert step.running.after_step == [torch.mps.empty_cache]
    assert step.running.after_step == []


def on(device: str, ledger: Ledger) -> Ledger:
    return replace(ledger, device=device)


@pytest.mark.parametrize("damage", [{"holes": None}, {"holes": -1}, {"holes": "6 %"}, {"threshold": [1]}, {"holes": True}])
def test_damaged_settings_are_told_before_anything_acts(damage: dict[str, object]) -> None:
    name = next(iter(damage))
    assert f"{name!r} is {damage[name]!r}" in damage_in("allocator", damage)
    assert not damage_in("allocator", dict(HOLES.settings)) and not damage_in("allocator", {"trim": True})
