"""What is said when nothing fits: what would help, each with its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit import Infeasible, Step
from memfit.levers import LEVERS
from memfit.planner.impossible import devices_that_would_help, infeasible, what_fills
from memfit.records import Ledger
from memfit.units import format_bytes, parse_bytes
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
    best, lowest = replace(plain, process_high_bytes=60 * MIB), 60 * MIB
    reachable = {"bitwise": 60 * MIB, "reordered": 20 * MIB, "redrawn": 60 * MIB, "rounded": 15 * MIB}
    error = infeasible(30 * MIB, best, plain, "bitwise", reachable, {"half": 40 * MIB, "double": 90 * MIB}, SPLIT)
    four = SPLIT.rewrite(plain, next(o for o in SPLIT.options(plain) if o.settings["size"] == 16384 // 4)).process_high_bytes
    assert four <= 30 * MIB and error.lowest_bytes == lowest and error.reachable_bytes == reachable
    assert str(error).splitlines() == [
        "This step does not fit 30.0 MiB: the lowest that can be reached with bitwise techniques is 60.0 MiB "
        "(upper end of the prediction).",
        *what_fills(best).splitlines(),
        "What would help:",
        "  - allow reordered: 20.0 MiB",
        "  - allow rounded: 15.0 MiB",
        "  - the variant 'half', as it is: 40.0 MiB (another training)",
        f"  - 4 devices with a part of the batch each: about {format_bytes(four)} each (data parallel, an estimate)",
        "  - a budget of 60.0 MiB or more",
        "  - a smaller batch or model",
    ]


def test_what_fills_the_lowest_is_all_of_it_and_who_holds_most() -> None:
    """Of the ledger of the lowest plan, not of the plain step: its categories, its base and what malloc may add come to its upper end."""
    step = wide()
    with pytest.raises(Infeasible) as error:
        memfit.plan(step, "2MiB", allow="reordered")
    _, filled, most, *_ = str(error.value).splitlines()
    parts = [part.removesuffix(".").rsplit(" ", 2) for part in filled.removeprefix("What fills it: ").split(", ")]
    told = {what: parse_bytes(f"{number}{unit}") for what, number, unit in parts}
    assert {"interpreter and libraries", "parameters", "activations", "what the allocator may hold beside them"} <= told.keys()
    assert abs(sum(told.values()) - error.value.lowest_bytes) < 0.01 * error.value.lowest_bytes
    assert told["activations"] < memfit.profile(step, simulate=True).by_category["activations"] // 2
    assert most.startswith("Most of its peak: ") and "/test_infeasible.py:" in most


def with_high(plain: Ledger, high: int) -> Ledger:
    return replace(plain, process_high_bytes=high)


def test_the_devices_are_the_fewest_that_are_enough() -> None:
    plain = ledger_of(wide())
    options = {-(-16384 // o.settings["size"]): o for o in SPLIT.options(plain)}
    sizes = {n: SPLIT.rewrite(plain, options[n]).process_high_bytes for n in (2, 4, 8)}
    for n, size in sizes.items():
        assert next(devices_that_would_help(plain, with_high(plain, 2**40), size, SPLIT)).startswith(
            f"{n} devices with a part of the batch each: about "
        )
    assert not list(devices_that_would_help(plain, with_high(plain, 2**40), 1, SPLIT))  # the most that are thought of are too few
    assert not list(devices_that_would_help(plain, with_high(plain, sizes[8]), sizes[8], SPLIT))  # no less than one reaches


def test_where_states_fill_it_sharing_them_is_told() -> None:
    net = nn.Linear(2048, 2048)
    step = Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.Adam(net.parameters()), torch.randn(8, 2048))
    plain = ledger_of(step)
    kept = sum(plain.by_category[kind] for kind in ("parameters", "gradients", "optimizer"))
    (told,) = devices_that_would_help(plain, plain, plain.process_high_bytes - kept // 2, SPLIT)
    assert told.startswith("2 devices that also share parameters, gradients and optimizer states: about ")
    assert told.endswith(" each (sharded data parallel, an estimate)")


@pytest.mark.parametrize("split", [None, SPLIT])
def test_a_batch_that_cannot_be_split_is_not_spread(split: object) -> None:
    plain = ledger_of(convolutional_2d())  # batch statistics
    assert not list(devices_that_would_help(plain, with_high(plain, 2**40), 2**39, split))  # type: ignore[arg-type]


def test_a_real_plan_says_so_too() -> None:
    step = wide()
    plain = memfit.profile(step, simulate=True)
    eighth = next(o for o in SPLIT.options(plain) if o.settings["size"] == 16384 // 8)
    with pytest.raises(Infeasible) as error:
        memfit.plan(step, SPLIT.rewrite(plain, eighth).process_high_bytes + MIB, allow="bitwise")
    words = str(error.value)
    assert "  - the variant 'narrow', as it is: " in words and "twice the width" not in words
    assert "(data parallel, an estimate)" in words and "  - allow reordered: " in words


def test_a_variant_is_planned_where_another_training_is_allowed() -> None:
    step = wide()
    narrow = memfit.profile(step.variants["narrow"](), simulate=True)
    only = {"architecture": LEVERS["architecture"]}
    plan = memfit.plan(step, narrow.process_high_bytes + 4 * MIB, allow="altered", levers=only)
    assert [(lever.name, lever.option) for lever in plan.levers] == [("architecture", "narrow")] and plan.exactness == "altered"
