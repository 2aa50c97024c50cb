"""Steps that make keeping, remaking and putting away of saved tensors hard, and what is asked of each: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memfit
from lever_law import differences, made, state_after
from memfit import Step
from memfit.levers.saved.apply import apply_tables
from memfit.levers.saved.line import Line, line_of
from memfit.levers.saved.table import make_tables
from memfit.step.running import Part
from quick_ledgers import seen
from small_steps import SMALL_STEPS, sgd

Decisions = Mapping[int, str]


class Block(nn.Module):
    """As in a ResNet: normalized over the batch, written in place, added in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        out += x
        return self.relu(out)


def residual() -> Step:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Block(8), Block(8), nn.Conv2d(8, 3, 1))
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), sgd(net, momentum=0.9), torch.randn(2, 3, 12, 12))


class Views(nn.Module):
    """Saves pieces, transposed and sliced forms of one result, and a piece that was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wide(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        mixed = torch.tanh(weights @ v) * v.clone()
        shifted = mixed[:, 1:] * mixed[:, :-1].sigmoid()
        padded = F.pad(shifted, (0, 0, 0, 1))
        padded[:, -1] += x[:, 0]
        return x + self.out(padded.sin().mul_(0.5).unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2))


def views() -> Step:
    net = nn.Sequential(Views(), Views())
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(2, 12, 16))


def called_twice() -> Step:
    net = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.3), nn.LayerNorm(16))
    return Step(net, lambda m, x: (m(m(x)) * m(x + 1)).mean(), torch.optim.AdamW(net.parameters()), torch.randn(32, 16))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        cube = square * x
        ctx.save_for_backward(square, cube)
        return cube

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        square, cube = ctx.saved_tensors
        return grad * 3 * square + 0 * cube


class Cube(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cubed.apply(x)


def own_function() -> Step:
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), Cube(), nn.Linear(64, 16))
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(16, 16))


def gradient_penalty() -> Step:
    """A gradient inside the loss, which is itself differentiated."""
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        value = m(x).sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value / len(x) + (slope.norm(dim=1) - 1).pow(2).mean()

    return Step(net, loss, sgd(net), torch.randn(16, 8))


def graph_retained() -> Step:
    """A gradient is taken inside the loss, and then backward goes through the same graph once more."""
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        value = m(x).pow(2).mean()
        (slope,) = torch.autograd.grad(value, m[0].weight, retain_graph=True)
        return value * (1 + slope.norm())

    return Step(net, loss, sgd(net), torch.randn(16, 16))


def autocast_around_backward() -> Step:
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))
    step = Step(net, lambda m, x: m(x).float().pow(2).mean(), sgd(net), torch.randn(16, 16))
    step.running.split = lambda phase, batch: [Part(batch, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))]
    return step


class Correlated(nn.Module):
    """A correlation through Fourier space: autograd saves results as torch reads them, conjugated or negated without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.first(x))
        kept_as_it_is = spectrum.conj() @ torch.fft.rfft(self.second(x)).transpose(-1, -2)
        negated = torch._neg_view(kept_as_it_is.real * 2)
        return torch.fft.irfft(spectrum.conj() * torch.fft.rfft(self.second(x).sin())) + (negated * negated).mean()


def conjugated() -> Step:
    net = nn.Sequential(Correlated(), nn.Linear(64, 4))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(32, 64))


def conjugated_in_place() -> Step:
    """What is written to is read as conjugated."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(m(x), norm="forward")
        turned = (spectrum * 2).conj()
        turned.copy_(spectrum * spectrum)
        before = turned + 1
        turned[:4].copy_(spectrum[4:8])
        return (before * turned).sin().abs().mean()

    return Step(net, loss, torch.optim.AdamW(net.parameters()), torch.randn(16, 64))


class Recurrent(nn.Module):
    """On a CPU, oneDNN's fused LSTM: beside its results it gives backward a workspace, which only a run under autograd has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([nn.LSTM(32, 32, batch_first=True) for _ in range(2)]), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0].sin()
        return self.out(x)


def recurrent() -> Step:
    net = Recurrent()
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(8, 16, 32))


def self_conditioned() -> Step:
    """The network's own guess, made without gradients, is an input of it: making that guess again takes every weight as it was."""
    net = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16))

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            guess = m(torch.cat([x, torch.zeros_like(x)], -1))
        return (m(torch.cat([x, guess], -1)) - x).pow(2).mean()

    return Step(net, loss, sgd(net), torch.randn(64, 16))


def frozen_convolutions() -> Step:
    encoder = nn.Conv2d(3, 8, 3, padding=1)
    layers = [nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)]
    net = nn.ModuleDict({"encoder": encoder, "decoder": nn.Sequential(*layers).requires_grad_(False)})
    return Step(net, lambda m, x: (m["decoder"](m["encoder"](x)) - x).pow(2).mean(), sgd(encoder), torch.randn(2, 3, 16, 16))


def written_outside() -> Step:
    """An in-place op between modules, on what a module made from and gave."""
    net = nn.ModuleDict({"first": nn.Linear(16, 64), "act": nn.Sigmoid(), "last": nn.Linear(64, 16)})

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m["first"](x)
        active = m["act"](hidden)
        hidden.mul_(2.0)
        return m["last"](active * hidden.cos()).pow(2).mean()

    return Step(net, loss, sgd(net), torch.randn(16, 16))


HARD: dict[str, Callable[[], Step]] = {
    make.__name__: make
    for make in (
        residual, views, called_twice, own_function, gradient_penalty, graph_retained, autocast_around_backward, frozen_convolutions,
        written_outside, conjugated, conjugated_in_place, recurrent,
        self_conditioned,
    )
}  # fmt: skip
STEPS = {**SMALL_STEPS, **HARD}


@cache
def line(name: str) -> Line:
    """Of the step as it is before any table."""
    trace = seen(made(STEPS[name])).trace
    assert trace is not None
    return line_of(trace)


def large(name: str) -> list[int]:
    """The ops whose results are worth a decision."""
    found = line(name)
    return [op for op, storages in sorted(found.made.items()) if any(found.trace.storages[s].bytes > 256 for s in storages)]


def spread(name: str, words: Sequence[str | None]) -> dict[int, str]:
    """The words one after the other over the large results, again from the first when they run out; None keeps."""
    return {op: word for place, op in enumerate(large(name)) if (word := words[place % len(words)])}


def put_on(name: str, step: Step, ops: Decisions) -> memfit.levers.Undo:
    return apply_tables(step, make_tables(line(name).trace, ops))


def bits_after(step: Step) -> dict[str, torch.Tensor]:
    """Everything a step leaves behind, gradients and the generator's state too."""
    found = state_after(step, 2)
    found["generator"] = torch.get_rng_state()
    for name, model in step.models.items():
        found |= {f"grad {name} {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return found


@cache
def plain_bits(name: str) -> dict[str, torch.Tensor]:
    return bits_after(made(STEPS[name]))


def unlike(name: str, ops: Decisions) -> list[str]:
    """What differs from the plain step with these decisions on."""
    step = made(STEPS[name])
    with put_on(name, step, ops):
        return differences(plain_bits(name), bits_after(step))
