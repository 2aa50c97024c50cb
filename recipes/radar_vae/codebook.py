"""The VQ-VAE: latents are exchanged for the nearest of 8192 codes, and the codes follow them as a moving average.

The average is kept by an optimizer, not by the forward pass. The batch's counts and sums reach it as the gradient of a parameter
that is always zero, so they add up over micro-batches as every gradient does, and eight parts of a batch move the codes as the whole
batch would: a codebook that is updated inside forward would move eight times.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recipes.radar_vae.model import LATENT_CHANNELS, VAE3D, VAEConfig

DECAY, COMMITMENT = 0.99, 0.25
_ROWS = 4096  # distances to 8192 codes are made for so many positions at a time: 128 MiB


class Codebook(nn.Module):
    """`codes` vectors; `statistics` is zero and stays zero: its gradient is what the batch says about each code."""

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, LATENT_CHANNELS), requires_grad=False)
        self.statistics = nn.Parameter(torch.zeros(codes, LATENT_CHANNELS + 1))

    def nearest(self, positions: torch.Tensor) -> torch.Tensor:
        """The number of the nearest code for each row: in the codes' own precision, of two codes half of it may take the farther one."""
        kind = positions.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            lengths, positions = self.codes.pow(2).sum(1), positions.to(self.codes.dtype)
            return torch.cat([(lengths - 2 * rows @ self.codes.T).argmin(1) for rows in positions.split(_ROWS)])

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The latent's codes with gradients passed straight through, each sample's commitment, and what the statistics learn by."""
        rows = latent.movedim(1, -1).reshape(-1, LATENT_CHANNELS)
        with torch.no_grad():
            number = self.nearest(rows)
            coded = self.codes[number].reshape(latent.movedim(1, -1).shape).movedim(-1, 1)
            counted = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
            seen = torch.zeros_like(self.statistics).index_add(0, number, counted.to(self.statistics.dtype)) / len(latent)
        commitment = (latent - coded).pow(2).flatten(1).mean(1)
        return latent + (coded - latent).detach(), commitment, (self.statistics * seen).sum()


class EMACodebook(Optimizer):
    """Each code becomes the moving average of the latents that chose it."""

    def __init__(self, codebooks: Iterable[Codebook], decay: float = DECAY) -> None:
        groups = [{"params": [book.codes, book.statistics]} for book in codebooks]
        super().__init__(groups, {"decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every code that was ever chosen towards what the batch showed."""
        for group in self.param_groups:
            codes, statistics = group["params"]
            if statistics.grad is None:
                continue
            state = self.state[statistics]
            if not state:  # as if each code had been seen once, where it is
                state["average"] = torch.cat([codes, torch.ones_like(codes[:, :1])], dim=1)
            state["average"].lerp_(statistics.grad, 1 - group["decay"])
            codes.copy_(state["average"][:, :-1] / state["average"][:, -1:].clamp_min(1e-6))


class VQVAE3D(VAE3D):
    """A VAE3D whose latent is made of codes."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(config)
        self.codebook = Codebook(config.codes)

    def latent_of(self, voxels: torch.Tensor) -> torch.Tensor:
        """The latent before it is exchanged for codes."""
        return self.to_moments(self.encoder(voxels))  # type: ignore[no-any-return]

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Voxels from a latent, through the codes nearest to it."""
        return super().decode(self.codebook(latent)[0])

    def forward(self, voxels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reconstruction, and each sample's commitment loss; the codebook's own term has the value zero."""
        coded, commitment, learning = self.codebook(self.latent_of(voxels))
        return super().decode(coded), COMMITMENT * commitment + learning
