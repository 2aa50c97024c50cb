"""The training step that `memfit demo` fits: a 3D convolutional autoencoder on a batch of volumes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from memfit.step import Step

_CHANNELS = (16, 32, 64)
_VOLUMES = (32, 1, 32, 48, 48)
_LATENT_CHANNELS = 4
_KL_WEIGHT = 1e-6


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1, self.conv2 = (nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape as given."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        out: torch.Tensor = x + hidden
        return out


class Up(nn.Module):
    """Twice the size in each direction, then a convolution to fewer channels."""

    def __init__(self, channels: int, fewer: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, fewer, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, channels, D, H, W] -> [B, fewer, 2D, 2H, 2W]."""
        out: torch.Tensor = self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class VolumeAutoencoder(nn.Module):
    """A variational autoencoder of volumes: a quarter of the size in each direction, four channels."""

    def __init__(self) -> None:
        super().__init__()
        wide, mid, deep = _CHANNELS
        self.encoder = nn.Sequential(
            nn.Conv3d(1, wide, 3, padding=1),
            ResidualBlock(wide),
            nn.Conv3d(wide, mid, 3, stride=2, padding=1),
            ResidualBlock(mid),
            nn.Conv3d(mid, deep, 3, stride=2, padding=1),
            ResidualBlock(deep),
            nn.Conv3d(deep, 2 * _LATENT_CHANNELS, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv3d(_LATENT_CHANNELS, deep, 3, padding=1),
            ResidualBlock(deep),
            Up(deep, mid),
            ResidualBlock(mid),
            Up(mid, wide),
            ResidualBlock(wide),
            nn.GroupNorm(8, wide),
            nn.SiLU(),
            nn.Conv3d(wide, 1, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The reconstruction, and mean and log-variance of the latents."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(latents), mean, log_variance


def reconstruction_and_kl(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean squared distance to the input plus a little of the latents' divergence from a normal distribution."""
    reconstruction, mean, log_variance = model(batch)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    loss: torch.Tensor = functional.mse_loss(reconstruction, batch) + _KL_WEIGHT * divergence
    return loss


def volume_autoencoder() -> Step:
    """The autoencoder with AdamW and a batch of random volumes: several GiB if it were run as it is."""
    model = VolumeAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Step(model, reconstruction_and_kl, optimizer, torch.rand(_VOLUMES))
