"""A small class-conditional network whose attention blocks look at the outer product of the condition with itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from memfit import Step
from memfit.levers.outer_product import factored
from memfit.ops.outer_product import factored_attention

HEADS = 2


class Block(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.encoder_kv, self.proj = nn.Conv1d(width, 2 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        batch, channels, tokens = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, 1)
        size = channels // HEADS
        more_k, more_v = self.encoder_kv(context).reshape(batch * HEADS, 2 * size, -1).split(size, 1)
        q, k, v = (t.reshape(batch * HEADS, size, -1) for t in (q, k, v))
        k, v = torch.cat([more_k, k], -1), torch.cat([more_v, v], -1)
        scale = 1 / math.sqrt(math.sqrt(size))
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), -1)
        return x + self.proj(torch.einsum("bts,bcs->bct", weight, v).reshape(batch, channels, tokens))


class Conditioned(nn.Module):
    def __init__(self, channels: int = 32, width: int = 256, blocks: int = 2) -> None:
        super().__init__()
        self.label = nn.Embedding(10, width)
        self.into, self.out = nn.Conv1d(3, channels, 3, padding=1), nn.Conv1d(channels, 3, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels, width) for _ in range(blocks))

    def context(self, y: torch.Tensor) -> torch.Tensor:
        c = self.label(y)
        return torch.einsum("ab,ac->abc", c, c)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        context, h = self.context(y), self.into(x)
        for block in self.blocks:
            h = block(h, context)
        return self.out(h)


def factored_model(model: Any) -> Any:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c, h = model.label(y), model.into(x)
        for block in model.blocks:
            h = block(h, c)
        return model.out(h)

    return forward


def factored_block(block: Any) -> Any:
    def forward(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        q, k, v = block.qkv(block.norm(x)).chunk(3, 1)
        return x + block.proj(factored_attention(q, k, v, c, block.encoder_kv.weight, block.encoder_kv.bias, HEADS))

    return forward


def describe() -> None:
    factored(Conditioned, factored_model)
    factored(Block, factored_block)


def conditioned(batch: int = 4, tokens: int = 64, **sizes: int) -> Step:
    net = Conditioned(**sizes)
    data = {"x": torch.randn(batch, 3, tokens), "y": torch.randint(0, 10, (batch,))}
    return Step(net, lambda m, b: (m(b["x"], b["y"]) - b["x"]).pow(2).mean(), torch.optim.AdamW(net.parameters()), data)
