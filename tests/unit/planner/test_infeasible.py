"""What is said when nothing fits: what would help, each with its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit import Infeasible, Step
from memfit.levers import LEVERS
from memfit.planner.explaining import devices_that_would_help, infeasible
from memfit.records import Ledger
from memfit.units import format_bytes
from quick_ledgers import seen
from small_steps import convolutional_2d, sgd

MIB = 2**20
SPLIT = LEVERS["microbatch"]


def wide(width: int = 256, samples: int = 16384) -> Step:
    net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    variants = {"narrow": lambda: wide(8), "twice the width": lambda: wide(2 * width)} if width == 256 else {}
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(samples, 64), variants=variants)


def ledger_of(step: Step) -> Ledger:
    ledger = seen(step)
    return replace(ledger, process_high_bytes=ledger.peak_bytes + ledger.process.base_bytes)


def test_everything_that_would_help_is_told_with_its_bytes() -> None:
    plain = ledger_of(wide())
    lowest, reachable = 60 * MIB, {"bitwise": 60 * MIB, "reordered": 20 * MIB, "redrawn": 60 * MIB, "rounded": 15 * MIB}
    error = infeasible(30 * MIB, lowest, plain, "bitwise", reachable, {"half": 40 * MIB, "double": 90 * MIB}, SPLIT)
    four = SPLIT.rewrite(plain, next(o for o in SPLIT.options(plain) if o.settings["size"] == 16384 // 4)).process_high_bytes
    kept = sum(plain.by_category[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert four <= 30 * MIB and error.lowest_bytes == lowest and error.reachable_bytes == reachable
    assert str(error).splitlines() == [
        "This step does not fit 30.0 MiB: the lowest that can be reached with bitwise techniques is 60.0 MiB "
        "(upper end of the prediction).",
        f"What fills it: parameters, gradients and optimizer {format_bytes(kept)}; the rest is the highest moment of the passes.",
        "What would help:",
        "  - allow reordered: 20.0 MiB",
        "  - allow rounded: 15.0 MiB",
        "  - the variant 'half', as it is: 40.0 MiB (another training)",
        f"  - 4 devices with a part of the batch each: about {format_bytes(four)} each (data parallel, an estimate)",
        "  - a budget of 60.0 MiB or more",
        "  - a smaller batch or model",
    ]


def test_the_devices_are_the_fewest_that_are_enough() -> None:
    plain = ledger_of(wide())
    options = {-(-16384 // o.settings["size"]): o for o in SPLIT.options(plain)}
    sizes = {n: SPLIT.rewrite(plain, options[n]).process_high_bytes for n in (2, 4, 8)}
    for n, size in sizes.items():
        assert next(devices_that_would_help(plain, size, 2**40, SPLIT)).startswith(f"{n} devices with a part of the batch each: about ")
    assert next(devices_that_would_help(plain, 1, 2**40, SPLIT)).startswith("8 devices")  # the most that are thought of
    assert not list(devices_that_would_help(plain, 1, sizes[8], SPLIT))  # no less than what one device reaches


def test_where_states_fill_it_sharing_them_is_told() -> None:
    net = nn.Linear(2048, 2048)
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(8, 2048))
    plain = ledger_of(step)
    (told,) = devices_that_would_help(plain, plain.peak_bytes * 2 // 5, plain.peak_bytes // 2, SPLIT)
    assert told.startswith("2 devices that also share parameters, gradients and optimizer states: about ")
    assert told.endswith(" each (sharded data parallel, an estimate)")


@pytest.mark.parametrize("split", [None, SPLIT])
def test_a_batch_that_cannot_be_split_is_not_spread(split: object) -> None:
    plain = ledger_of(convolutional_2d())  # batch statistics
    assert not list(devices_that_would_help(plain, 1, 2**40, split))  # type: ignore[arg-type]


def test_a_real_plan_says_so_too() -> None:
    with pytest.raises(Infeasible) as error:
        memfit.plan(wide(), "2MiB", allow="bitwise")
    words = str(error.value)
    assert "  - the variant 'narrow', as it is: " in words and "twice the width" not in words
    assert "(data parallel, an estimate)" in words and "  - allow reordered: " in words


def test_a_variant_is_planned_where_another_training_is_allowed() -> None:
    step = wide()
    narrow = memfit.profile(step.variants["narrow"](), simulate=True)
    only = {"architecture": LEVERS["architecture"]}
    plan = memfit.plan(step, narrow.process_high_bytes + 4 * MIB, allow="altered", levers=only)
    assert [(lever.name, lever.option) for lever in plan.levers] == [("architecture", "narrow")] and plan.exactness == "altered"
