"""The UNet: residual blocks that hear the time and the class, attention blocks that also look at the class's outer product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit.levers.attention import describe_attention
from memfit.ops.attention import Attend
from memfit.ops.outer_product import FactoredContext
from recipes.conditional_unet.conditioning import ConditionProduct, Context, OptimizationConfig


@dataclass(frozen=True)
class Sizes:
    """The defaults train on a laptop; `embed_dim` is 512, as documented. Without `cemb_mm` it is the model before the fix."""

    image_size: int = 32
    model_channels: int = 128
    channel_mult: tuple[int, ...] = (1, 2)
    num_res_blocks: int = 1
    attention_resolutions: tuple[int, ...] = (16,)
    num_heads: int = 4
    num_classes: int | None = 10
    cemb_mm: bool = True

    @property
    def embed_dim(self) -> int:
        """Of the time and of the class."""
        return 4 * self.model_channels


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with its whole map, as the original does it, on [..., tokens, channels]."""
    scale = 1 / math.sqrt(math.sqrt(query.shape[-1]))
    weight = torch.softmax((query * scale) @ (key * scale).mT, -1)
    return weight @ value


class ConditionalUNet(nn.Module):
    """`forward(x, timesteps, y, threshold, null, clf_free)` as documented; `attend` is the attention kernel of every block."""

    def __init__(self, sizes: Sizes, config: OptimizationConfig | None = None, attend: Attend = written_out) -> None:
        super().__init__()
        self.sizes, self.config, width = sizes, config or OptimizationConfig(), sizes.embed_dim
        self.time_embed = nn.Sequential(nn.Linear(sizes.model_channels, width), nn.SiLU(), nn.Linear(width, width))
        if sizes.num_classes is not None:
            self.label_emb = nn.Embedding(sizes.num_classes, width)
        if self.looks_at_class:
            self.class_emb = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            self.product = ConditionProduct(self.config)
        self._build(sizes, attend)

    @property
    def looks_at_class(self) -> bool:
        """Whether attention blocks get the condition's outer product."""
        return self.sizes.num_classes is not None and self.sizes.cemb_mm

    def _build(self, sizes: Sizes, attend: Attend) -> None:
        width = sizes.embed_dim
        channels = [sizes.model_channels * mult for mult in sizes.channel_mult]

        def stage(now: int, then: int, resolution: int, *more: nn.Module) -> Stage:
            looks = resolution in sizes.attention_resolutions
            attention = [AttentionBlock(then, width if self.looks_at_class else None, sizes.num_heads, attend)] if looks else []
            return Stage([ResBlock(now, then, width), *attention, *more])

        now, resolution = channels[0], sizes.image_size
        self.input_blocks = nn.ModuleList([Stage([nn.Conv2d(3, now, 3, padding=1)])])
        kept = [now]
        for level, then in enumerate(channels):
            for _ in range(sizes.num_res_blocks):
                self.input_blocks.append(stage(now, now := then, resolution))
                kept.append(now)
            if level + 1 < len(channels):
                self.input_blocks.append(Stage([nn.Conv2d(now, now, 3, stride=2, padding=1)]))
                kept.append(now)
                resolution //= 2
        looking = AttentionBlock(now, width if self.looks_at_class else None, sizes.num_heads, attend)
        self.middle_block = Stage([ResBlock(now, now, width), looking, ResBlock(now, now, width)])
        self.output_blocks = nn.ModuleList()
        for level, then in reversed(list(enumerate(channels))):
            for number in range(sizes.num_res_blocks + 1):
                up = [Upsample(then)] if level and number == sizes.num_res_blocks else []
                self.output_blocks.append(stage(now + kept.pop(), now := then, resolution, *up))
            resolution *= 2
        self.out = nn.Sequential(nn.GroupNorm(32, now), nn.SiLU(), nn.Conv2d(now, 3, 3, padding=1))

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        y: torch.Tensor | None = None,
        threshold: float = -1,
        null: bool = False,
        clf_free: bool = False,
    ) -> torch.Tensor:
        """The noise in `x`. `threshold` > 0: training, conditions are dropped with that probability; `clf_free`: sampling."""
        emb = self.time_embed(timestep_embedding(timesteps, self.sizes.model_channels).to(x.dtype))
        cemb_mm: Context = None
        if self.looks_at_class:
            cemb = self.condition(emb, y, threshold, null, clf_free)
            emb, cemb_mm = emb + cemb, self.product(cemb)
        elif y is not None and self.sizes.num_classes is not None:
            emb = emb + self.label_emb(y)
        return self._torso(x, emb, cemb_mm)

    def condition(self, emb: torch.Tensor, y: torch.Tensor | None, threshold: float, null: bool, clf_free: bool) -> torch.Tensor:
        """The embedding of each sample's class; zero where it is dropped, or where none is wanted."""
        if threshold != -1 and threshold <= 0:
            raise ValueError(f"threshold is {threshold}: it is the probability of dropping a condition, above 0, or -1 when sampling.")
        if threshold == -1 and not clf_free:
            raise ValueError("Invalid condition setup: give a threshold above 0 (training), or clf_free=True (sampling).")
        if threshold == -1 and null:
            return torch.zeros_like(emb)
        if y is None or y.shape != emb.shape[:1]:
            raise ValueError(f"y must have one class for each of the {emb.shape[0]} samples.")
        cemb: torch.Tensor = self.class_emb(self.label_emb(y))
        if threshold == -1:
            return cemb
        dropped = torch.rand(cemb.shape[0], device=cemb.device) < threshold
        return cemb.masked_fill(dropped.unsqueeze(1), 0.0)

    def _torso(self, x: torch.Tensor, emb: torch.Tensor, cemb_mm: Context) -> torch.Tensor:
        h, hs = x, []
        for module in self.input_blocks:
            h = self._call(module, h, emb, cemb_mm)
            hs.append(h)
        h = self._call(self.middle_block, h, emb, cemb_mm)
        for module in self.output_blocks:
            h = self._call(module, torch.cat([h, hs.pop()], dim=1), emb, cemb_mm)
        return self.out(h)  # type: ignore[no-any-return]

    def _call(self, module: nn.Module, h: torch.Tensor, emb: torch.Tensor, cemb_mm: Context) -> torch.Tensor:
        if self.config.use_checkpoint and torch.is_grad_enabled():
            return checkpoint(module, h, emb, cemb_mm, use_reentrant=False)  # type: ignore[no-any-return]
        return module(h, emb, cemb_mm)  # type: ignore[no-any-return]


class Stage(nn.ModuleList):
    """Blocks in a row; each gets of time and class what it listens to."""

    def forward(self, h: torch.Tensor, emb: torch.Tensor, cemb_mm: Context) -> torch.Tensor:
        """Through all of them."""
        for block in self:
            match block:
                case ResBlock():
                    h = block(h, emb)
                case AttentionBlock():
                    h = block(h, cemb_mm)
                case _:
                    h = block(h)
        return h


class ResBlock(nn.Module):
    """Norm, SiLU, convolution, twice; the embedding is added between."""

    def __init__(self, channels: int, out_channels: int, embed_dim: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embed_dim, out_channels))
        self.out_layers = nn.Sequential(nn.GroupNorm(32, out_channels), nn.SiLU(), nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.skip = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, h: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        inside = self.in_layers(h) + self.emb_layers(emb)[:, :, None, None]
        return self.skip(h) + self.out_layers(inside)  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """The image's positions look at each other, and at the columns of c⊗c, which `encoder_kv` turns into keys and values."""

    def __init__(self, channels: int, context_dim: int | None, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm, self.qkv = nn.GroupNorm(32, channels), nn.Conv1d(channels, 3 * channels, 1)
        self.encoder_kv = None if context_dim is None else nn.Conv1d(context_dim, 2 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor, context: Context = None) -> torch.Tensor:
        """The block's output, with the model's own kernel."""
        return self.attended(x, context, self.attend)

    def attended(self, x: torch.Tensor, context: Context, attend: Attend) -> torch.Tensor:
        """The block's output. No context at all is not the same as a zero one, whose keys are the bias of `encoder_kv`."""
        batch, channels, *spatial = x.shape
        q, k, v = self.qkv(self.norm(x.flatten(2))).chunk(3, 1)
        if isinstance(context, FactoredContext):
            assert self.encoder_kv is not None
            h = context.attended(q, k, v, self.encoder_kv.weight, self.encoder_kv.bias, self.heads)
        else:
            q, k, v = (t.reshape(batch, self.heads, channels // self.heads, -1).mT for t in (q, k, v))
            if context is not None:
                assert self.encoder_kv is not None
                more_k, more_v = self.encoder_kv(context).reshape(batch, self.heads, 2 * channels // self.heads, -1).mT.chunk(2, -1)
                k, v = torch.cat([more_k, k], -2), torch.cat([more_v, v], -2)
            h = attend(q, k, v).mT.reshape(batch, channels, -1)
        out: torch.Tensor = x + self.proj_out(h).reshape(batch, channels, *spatial)
        return out


class Upsample(nn.Module):
    """Twice the size, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """The larger image."""
        return self.conv(F.interpolate(h, scale_factor=2))  # type: ignore[no-any-return]


def timestep_embedding(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    """Cosines and sines of each time at `dim` / 2 frequencies."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=timesteps.device) / (dim // 2))
    angles = timesteps[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _other_kernel(module: AttentionBlock, attend: Attend) -> Callable[..., torch.Tensor]:
    return lambda x, context=None: module.attended(x, context, attend)


describe_attention(AttentionBlock, _other_kernel)  # type: ignore[arg-type]
