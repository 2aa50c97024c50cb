"""Small real training steps of every kind memfit has to cope with. Each factory makes a fresh Step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfit import Phase, Step


def sgd(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, **options)


def dense() -> Step:
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(32, 64))


def convolutional_2d() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.Flatten(),
        nn.Linear(8192, 10),
    )
    batch = {"image": torch.randn(4, 3, 32, 32), "label": torch.randint(0, 10, (4,))}
    return Step(net, lambda model, b: F.cross_entropy(model(b["image"]), b["label"]), sgd(net, momentum=0.9), batch)


def convolutional_3d() -> Step:
    net = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
        nn.Conv3d(8, 8, 3, 2, 1),
        nn.Upsample(scale_factor=2),
        nn.Conv3d(8, 1, 1),
    )
    return Step(net, lambda model, x: (model(x) - x).abs().mean(), torch.optim.Adam(net.parameters()), torch.randn(2, 1, 16, 32, 32))


def transformer(dropout: float = 0.1) -> Step:
    net = nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True), nn.Linear(32, 100))
    tokens = torch.randint(0, 100, (4, 24))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1]["next"].flatten())

    return Step(net, loss, torch.optim.AdamW(net.parameters(), foreach=True), (tokens, {"next": tokens}))


def frozen_decoder() -> Step:
    encoder = nn.Linear(16, 32)
    decoder = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).requires_grad_(False)
    net = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    return Step(net, lambda m, x: F.mse_loss(m["decoder"](m["encoder"](x)), x), sgd(encoder), torch.randn(8, 16))


def two_phases() -> Step:
    models = {"generator": nn.Linear(8, 8), "critic": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))}

    def make(nets: Any, batch: torch.Tensor, carry: dict[str, Any]) -> torch.Tensor:
        carry["fake"] = nets["generator"](batch)
        return -nets["critic"](carry["fake"]).mean()

    def judge(nets: Any, batch: torch.Tensor, carry: dict[str, Any]) -> torch.Tensor:
        assert not carry["fake"].requires_grad  # phases share values, not graphs
        return nets["critic"](carry["fake"]).mean() - nets["critic"](batch).mean()

    phases = [
        Phase("generator", make, torch.optim.Adam(models["generator"].parameters()), clip_grad_norm=1.0),
        Phase("critic", judge, torch.optim.SGD(models["critic"].parameters(), 0.1)),
    ]
    return Step(models, phases=phases, batch=torch.randn(16, 8))


def mixed_precision() -> Step:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (model(x) - x).pow(2).mean()

    return Step(net, loss, torch.optim.AdamW(net.parameters(), fused=True), torch.randn(2, 3, 32, 32))


def shared_parameters() -> Step:
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    net[1].weight = net[0].weight
    tokens = torch.randint(0, 50, (4, 12))
    return Step(net, lambda m, t: F.cross_entropy(m(t).flatten(0, 1), t.flatten()), sgd(net), tokens)


def in_place_ops() -> Step:
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 16))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x).add_(1.0).mul_(2.0)
        y[:, :4] = 0.0
        return y.pow(2).mean()

    return Step(net, loss, [sgd(net[0]), sgd(net[2])], torch.randn(8, 16), clip_grad_norm=0.5)


SMALL_STEPS: dict[str, Callable[[], Step]] = {
    make.__name__: make
    for make in (
        dense, convolutional_2d, convolutional_3d, transformer, frozen_decoder, two_phases, mixed_precision, shared_parameters, in_place_ops
    )
}  # fmt: skip
