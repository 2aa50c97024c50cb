"""The 3D VAE: voxels [4, 32, 128, 128] (channels, z, y, x) to a latent [4, 16, 32, 32] and back, in the documented sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CHANNELS, GRID = 4, (32, 128, 128)
LATENT_CHANNELS, STRIDES = 4, ((1, 2, 2), (2, 2, 2))  # z is spared once: there are only 32 slices
REDUCTION = (2, 4, 4)


@dataclass(frozen=True)
class VAEConfig:
    """One type of VAE. `codes` > 0 makes it a VQ-VAE with so many."""

    base_channels: int
    channel_mult: tuple[int, int, int]
    num_res_blocks: int = 1
    attention: bool = False
    codes: int = 0
    use_checkpoint: bool = False


VAE_TYPES = {
    "standard": VAEConfig(64, (1, 2, 4), num_res_blocks=2, attention=True),
    "lightweight": VAEConfig(32, (1, 2, 4)),
    "ultra_lightweight": VAEConfig(16, (1, 2, 2)),
    "vq_vae": VAEConfig(32, (1, 2, 4), codes=8192),
}


class ResBlock3D(nn.Module):
    """norm, SiLU, convolution, twice. GroupNorm only: a sample's result never depends on its neighbours in the batch."""

    def __init__(self, channels: int, out_channels: int, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), conv(channels, out_channels)
        self.norm2, self.conv2 = norm(out_channels), conv(out_channels, out_channels)
        self.skip = nn.Identity() if channels == out_channels else nn.Conv3d(channels, out_channels, 1)
        self.use_checkpoint = use_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, made again in backward if it is checkpointed."""
        if self.use_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return torch.add(self.skip(x), h)


class Attention3D(nn.Module):
    """Every position of the volume looks at every other; fused, so that no map of 16,384 × 16,384 is written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = norm(channels), nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x plus what each position read from the others."""
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(tokens)[:, None].chunk(3, dim=-1)
        read = self.out(F.scaled_dot_product_attention(query, key, value)[:, 0])
        return torch.add(x, read.transpose(1, 2).reshape(x.shape))


class Upsample3D(nn.Module):
    """Nearest neighbours, then a convolution; the factor is the stride of the way down, so sizes always match."""

    def __init__(self, channels: int, factor: tuple[int, int, int]) -> None:
        super().__init__()
        self.factor, self.conv = tuple(float(f) for f in factor), conv(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x on a finer grid."""
        return self.conv(F.interpolate(x, scale_factor=self.factor, mode="nearest"))  # type: ignore[no-any-return]


class VAE3D(nn.Module):
    """Encoder, a Gaussian (or a codebook) between, decoder."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Sequential(*_encoder(config))
        self.decoder = nn.Sequential(*_decoder(config))
        moments = LATENT_CHANNELS if config.codes else 2 * LATENT_CHANNELS
        self.to_moments = nn.Conv3d(moments, moments, 1)
        self.from_latent = nn.Conv3d(LATENT_CHANNELS, LATENT_CHANNELS, 1)

    def encode(self, voxels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent's mean and log-variance."""
        mean, logvar = self.to_moments(self.encoder(voxels)).chunk(2, dim=1)
        return mean, logvar.clamp(-30, 20)

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Voxels from a latent."""
        return self.decoder(self.from_latent(latent))  # type: ignore[no-any-return]

    def latent_of(self, voxels: torch.Tensor) -> torch.Tensor:
        """Where the encoder puts these voxels, without noise: what latent diffusion is trained on."""
        return self.encode(voxels)[0]

    def forward(self, voxels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reconstruction, and the KL divergence of each sample (the mean over its latent)."""
        mean, logvar = self.encode(voxels)
        latent = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).flatten(1).mean(1)
        return self.decode(latent), kl


def norm(channels: int) -> nn.GroupNorm:
    """A group norm of 8 groups."""
    return nn.GroupNorm(8, channels, eps=1e-6)


def conv(channels: int, out_channels: int, stride: tuple[int, int, int] = (1, 1, 1)) -> nn.Conv3d:
    """A convolution that keeps the size, or divides it by the stride."""
    return nn.Conv3d(channels, out_channels, 3, stride, padding=1)


def _encoder(config: VAEConfig) -> Iterator[nn.Module]:
    widths = [config.base_channels * mult for mult in config.channel_mult]
    yield conv(CHANNELS, width := widths[0])
    for level, wide in enumerate(widths):
        for _ in range(config.num_res_blocks):
            yield ResBlock3D(width, wide, config.use_checkpoint)
            width = wide
        if level < len(STRIDES):
            yield conv(width, width, STRIDES[level])
    yield from _middle(width, config)
    yield from (norm(width), nn.SiLU(), conv(width, LATENT_CHANNELS if config.codes else 2 * LATENT_CHANNELS))


def _decoder(config: VAEConfig) -> Iterator[nn.Module]:
    widths = [config.base_channels * mult for mult in config.channel_mult]
    yield conv(LATENT_CHANNELS, width := widths[-1])
    yield from _middle(width, config)
    for level, wide in reversed(list(enumerate(widths))):
        for _ in range(config.num_res_blocks + 1):
            yield ResBlock3D(width, wide, config.use_checkpoint)
            width = wide
        if level > 0:
            yield Upsample3D(width, STRIDES[level - 1])
    yield from (norm(width), nn.SiLU(), conv(width, CHANNELS))


def _middle(width: int, config: VAEConfig) -> Iterator[nn.Module]:
    yield ResBlock3D(width, width, config.use_checkpoint)
    if config.attention:
        yield Attention3D(width)
    yield ResBlock3D(width, width, config.use_checkpoint)


def latent_shape(grid: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """[4, 16, 32, 32] for the documented grid."""
    z, y, x = (size // reduction for size, reduction in zip(grid, REDUCTION, strict=True))
    return LATENT_CHANNELS, z, y, x


def make_vae(vae_type: str, use_checkpoint: bool = False) -> VAE3D:
    """A VAE of a documented type."""
    from recipes.radar_vae.codebook import VQVAE3D  # it builds on this file

    config = replace(VAE_TYPES[vae_type], use_checkpoint=use_checkpoint)
    return VQVAE3D(config) if config.codes else VAE3D(config)


def type_of(vae: VAE3D) -> str:
    """The documented name of its kind.

    >>> type_of(make_vae("ultra_lightweight", use_checkpoint=True))
    'ultra_lightweight'
    """
    return next(name for name, config in VAE_TYPES.items() if config == replace(vae.config, use_checkpoint=False))
