"""The small steps that every lever is tried on, what each lever can do to them, and how the plain ones run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memfit
from conditioned import conditioned
from lever_law import differences, furniture, made, simulated, state_after
from memfit import Ledger, Step
from memfit.fitting.plan_rows import rows_of
from memfit.levers import LEVERS, Lever
from memfit.levers.architecture import ArchitectureLever
from memfit.proof.fitted import Judgement, judge
from memfit.proof.fitting_sample import Sample
from memfit.proof.reference import Reference
from memfit.records import Option
from quick_ledgers import seen
from saved_steps import STEPS
from small_steps import sgd

MEASURED_FIRST = {"compile"}  # nothing is said of it before it has run: test_compile.py


def chunked_decoder() -> Step:
    """A frozen decoder and its loss behind memfit.chunked."""
    net = nn.ModuleDict({"project": nn.Linear(16, 32), "decoder": nn.Sequential(nn.Linear(32, 512), nn.SiLU(), nn.Linear(512, 64))})
    net["decoder"].requires_grad_(False)

    def loss(m: Any, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return memfit.chunked(lambda z, x: F.mse_loss(m["decoder"](z), x), m["project"](b["code"]), b["pixels"])

    batch = {"code": torch.randn(16, 16), "pixels": torch.randn(16, 64)}
    return Step(net, loss, sgd(net["project"]), batch)


class Attending(nn.Module):
    """Its map of 64 by 64 is written out, since weights are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.attention(x, x, x)[0])


def written_attention() -> Step:
    net = Attending()
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(8, 64, 32))


def outer_product_context() -> Step:
    return conditioned(batch=2, tokens=48, channels=32, width=256, blocks=1)


def loaded() -> Step:
    """Its batches come from two workers."""
    net, data = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.arange(512.0).view(32, 16) / 512
    loader = DataLoader(TensorDataset(data), 4, num_workers=2)
    return Step(net, lambda m, b: (m(b[0]) - b[0]).pow(2).mean(), torch.optim.AdamW(net.parameters()), [data[:4]], loader=loader)


def of_width(width: int, **more: Any) -> Step:
    net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(256, 16), **more)


def with_variants() -> Step:
    return of_width(64, variants={"half": lambda: of_width(32), "a quarter": lambda: of_width(16)})


WHOLE_PROFILES = {"loaded"}  # workers have to be started and weighed
_ADDED: dict[str, Callable[[], Step]] = {
    make.__name__: make for make in (chunked_decoder, written_attention, outer_product_context, loaded, with_variants)
}
_SHARED = (
    "dense", "convolutional_2d", "convolutional_3d", "transformer", "frozen_decoder", "two_phases", "mixed_precision", "in_place_ops",
    "residual", "frozen_convolutions",
)  # fmt: skip
ZOO: dict[str, Callable[[], Step]] = {name: STEPS[name] for name in _SHARED} | _ADDED


def step_of(name: str) -> Step:
    return made(ZOO[name])


@cache
def ledger(name: str) -> Ledger:
    return simulated(step_of(name)) if name in WHOLE_PROFILES else seen(step_of(name))


@cache
def levers(name: str) -> dict[str, Lever]:
    """All of them; the one that offers variants knows how large they are."""
    variants = {variant: seen(build()) for variant, build in step_of(name).variants.items()}
    return LEVERS | {"architecture": ArchitectureLever(variants)}


@cache
def options(name: str, lever: str) -> tuple[Option, ...]:
    return tuple(levers(name)[lever].options(ledger(name)))[:3]


def applicable(name: str) -> list[str]:
    return [lever for lever in LEVERS if lever not in MEASURED_FIRST and options(name, lever)]


@cache
def reference(name: str) -> Reference:
    """The plain step and what its runs gave; levers are put on it and taken off again."""
    return Reference(Sample(step_of(name)), 2)


def judged(name: str, chosen: Sequence[Option], more: Mapping[str, Lever] | None = None) -> Judgement:
    """The step run with these levers on, compared with the plain one by the rule of the loosest of them; `more` are levers of a test."""
    plain, known = reference(name), {**levers(name), **(more or {})}
    torch.manual_seed(1)  # all runs of a step start from the same random numbers, whenever they are
    return judge(plain, rows_of(chosen), known)


@cache
def plain_state(name: str) -> dict[str, torch.Tensor]:
    return state_after(step_of(name), 1)


def is_as_before(name: str, step: Step, before: list[Any]) -> bool:
    """Nothing hangs on it any more, and it trains to the same bits as one that nothing was ever put on."""
    return furniture(step) == before and differences(plain_state(name), state_after(step, 1)) == []
