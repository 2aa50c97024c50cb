"""What the VAE is trained by: voxels, features and the prior. All are means over samples, so a batch may be taken in parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from recipes.radar_vae.model import CHANNELS, VAE3D, conv

KL_WEIGHT, PERCEPTUAL_WEIGHT = 1e-6, 0.1
_OCCUPIED = 20.0  # radar is sparse: without this weight an empty volume is a good answer


class Perceptual3DLoss(nn.Module):
    """Distance of features of three frozen 3D convolutions, as LPIPS measures it in 2D.

    No network trained on radar volumes is public, so the features are random (fixed by a seed): they see edges and textures of three sizes,
    and mean nothing more.
    """

    def __init__(self, widths: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pairs = zip((CHANNELS, *widths), widths, strict=False)
            self.stages = nn.ModuleList(conv(channels, wide, (2, 2, 2)) for channels, wide in pairs)
        self.requires_grad_(False)

    def forward(self, made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The mean over samples of the distance of their features."""
        if made.dim() != 5 or made.shape != real.shape:
            shapes = f"{tuple(made.shape)} and {tuple(real.shape)}"
            raise ValueError(f"Perceptual3DLoss compares volumes [batch, channels, z, y, x] of one shape, not {shapes}.")
        total = made.new_zeros(())
        for stage in self.stages:
            made, real = F.silu(stage(made)), F.silu(stage(real))
            total = total + (_unit(made) - _unit(real)).pow(2).sum(1).mean()
        return total


def _unit(features: torch.Tensor) -> torch.Tensor:
    return features * torch.rsqrt(features.pow(2).sum(1, keepdim=True) + 1e-6)


def reconstruction_loss(made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Squared error, with more weight where there are points."""
    weight = 1 + _OCCUPIED * (real[:, :1] > 0)
    return (weight * (made - real).pow(2)).mean()


def vae_loss(vae: VAE3D, perceptual: Perceptual3DLoss, voxels: torch.Tensor, amp: bool = False) -> torch.Tensor:
    """Reconstruction, features, KL divergence (for a VQ-VAE: the commitment). With `amp` the network, not the loss, is in bfloat16."""
    voxels = voxels.to(vae.from_latent.weight.device)
    with torch.autocast(voxels.device.type, torch.bfloat16, enabled=amp):
        made, prior = vae(voxels)
        made = made.to(voxels.dtype)
    weight = 1.0 if vae.config.codes else KL_WEIGHT
    features: torch.Tensor = perceptual(made, voxels)
    prior_loss: torch.Tensor = weight * prior.mean()
    return reconstruction_loss(made, voxels) + PERCEPTUAL_WEIGHT * features + prior_loss
