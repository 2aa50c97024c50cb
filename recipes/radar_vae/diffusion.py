"""The second stage: a small 3D UNet learns to take noise out of the VAE's latents, and makes new ones from noise alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from recipes.radar_vae.model import LATENT_CHANNELS, Attention3D, conv, norm

STEPS = 1000


class TimedBlock3D(nn.Module):
    """A residual block that is told how much noise there is."""

    def __init__(self, channels: int, out_channels: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), conv(channels, out_channels)
        self.norm2, self.conv2 = norm(out_channels), conv(out_channels, out_channels)
        self.time = nn.Linear(time_width, out_channels)
        self.skip = nn.Identity() if channels == out_channels else nn.Conv3d(channels, out_channels, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x, changed according to the time."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[..., None, None, None]
        return torch.add(self.skip(x), self.conv2(F.silu(self.norm2(h))))


class LatentUNet(nn.Module):
    """Predicts the noise in a latent. Two resolutions, attention at the lower one."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width, timed = width, 4 * width
        self.embed = nn.Sequential(nn.Linear(width, timed), nn.SiLU(), nn.Linear(timed, timed), nn.SiLU())
        self.enter = conv(LATENT_CHANNELS, width)
        self.fine = TimedBlock3D(width, width, timed)
        self.down = conv(width, width, (2, 2, 2))
        self.coarse = TimedBlock3D(width, 2 * width, timed)
        self.attention = Attention3D(2 * width)
        self.coarse_again = TimedBlock3D(2 * width, 2 * width, timed)
        self.up = conv(2 * width, width)
        self.fine_again = TimedBlock3D(2 * width, width, timed)
        self.leave = nn.Sequential(norm(width), nn.SiLU(), conv(width, LATENT_CHANNELS))
        # what the latents of the training data look like, so that the diffusion sees mean 0 and deviation 1
        self.register_buffer("mean", torch.zeros(1, LATENT_CHANNELS, 1, 1, 1))
        self.register_buffer("deviation", torch.ones(1, LATENT_CHANNELS, 1, 1, 1))

    def fit_scale(self, latents: torch.Tensor) -> torch.Tensor:
        """Remember how these latents are distributed, channel by channel."""
        self.mean.copy_(latents.mean((0, 2, 3, 4), keepdim=True))
        self.deviation.copy_(latents.std((0, 2, 3, 4), keepdim=True))
        return latents

    def standardise(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the diffusion sees them."""
        return (latents - self.mean.cpu()) / self.deviation.cpu()

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The noise in `noisy` at these times (0 to STEPS - 1)."""
        told = self.embed(_waves(time, self.width))
        fine = self.fine(self.enter(noisy), told)
        coarse = self.coarse_again(self.attention(self.coarse(self.down(fine), told)), told)
        raised = self.up(F.interpolate(coarse, size=fine.shape[2:], mode="nearest"))
        return self.leave(self.fine_again(torch.cat([fine, raised], dim=1), told))  # type: ignore[no-any-return]


def _waves(time: torch.Tensor, width: int) -> torch.Tensor:
    rates = torch.exp(torch.arange(width // 2, device=time.device) * (-math.log(10_000) / (width // 2)))
    angles = time[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def kept_signal(time: torch.Tensor) -> torch.Tensor:
    """The share of the signal's variance left at these times: the cosine schedule."""
    return torch.cos((time.float() / STEPS + 0.008) / 1.008 * (math.pi / 2)).pow(2).clamp(1e-4, 1)


def diffusion_loss(unet: LatentUNet, latents: torch.Tensor) -> torch.Tensor:
    """How well the noise is foretold, at a random time for each latent."""
    latents = latents.to(unet.enter.weight.device)
    return _foretold(unet, latents, *_drawn(latents))


def one_by_one_loss(unet: LatentUNet, latents: torch.Tensor) -> float:
    """The same, from the same random numbers, one latent at a time: it takes no more memory than one."""
    latents = latents.to(unet.enter.weight.device)
    each = zip(latents.split(1), *(drawn.split(1) for drawn in _drawn(latents)), strict=True)
    return sum(float(_foretold(unet, *one)) for one in each) / len(latents)


def _drawn(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, STEPS, latents.shape[:1], device=latents.device), torch.randn_like(latents)


def _foretold(unet: LatentUNet, latents: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    kept = kept_signal(time)[:, None, None, None, None]
    noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
    foretold: torch.Tensor = unet(noisy, time)
    return (foretold.float() - noise).pow(2).mean()


@torch.no_grad()
def sample_latents(unet: LatentUNet, shape: tuple[int, ...], steps: int = 50) -> torch.Tensor:
    """New latents from noise, in so many steps (DDIM), scaled back to what the VAE knows."""
    device = unet.enter.weight.device
    latents = torch.randn(shape, device=device)
    times = torch.linspace(STEPS - 1, 0, steps, device=device).round().long()
    for number, time in enumerate(times):
        kept = kept_signal(time)
        left = kept_signal(times[number + 1]) if number + 1 < steps else torch.ones_like(kept)
        noise = unet(latents, time.expand(shape[0]))
        clean = ((latents - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-4, 4)  # standardised: nothing real is further out
        latents = left.sqrt() * clean + (1 - left).sqrt() * noise
    return latents * unet.deviation + unet.mean
