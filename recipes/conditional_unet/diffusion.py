"""Denoising diffusion: the loss of a batch, and pictures out of noise with classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recipes.conditional_unet.data import Images
from recipes.conditional_unet.model import ConditionalUNet

TIMES = 1000


def signal_left() -> torch.Tensor:
    """The share of the picture's variance that is left at each of the 1000 times (DDPM's linear schedule)."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, dtype=torch.float64), 0).float()


def denoising_loss(threshold: float) -> Callable[[ConditionalUNet, dict[str, torch.Tensor]], torch.Tensor]:
    """The mean squared error of the predicted noise; a sample's class is dropped with probability `threshold`."""

    def loss(model: ConditionalUNet, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, y = batch["x"], batch["y"]
        times = torch.randint(0, TIMES, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        left = signal_left().to(x.device)[times].view(-1, 1, 1, 1)
        noisy = left.sqrt() * x + (1 - left).sqrt() * noise
        predicted: torch.Tensor = model(noisy, times, y, threshold=threshold)
        return (predicted - noise).pow(2).mean()

    return loss


@torch.no_grad()
def validation_loss(model: Any, images: Images, size: int, threshold: float) -> float:
    """Over at most 512 held-out pictures, with the same times, noise and dropped classes every time."""
    loss, total, chosen = denoising_loss(threshold), 0.0, torch.arange(images.training, len(images.x))[:512]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for batch in images.batches(size, chosen):
            total += float(loss(model, batch)) * len(batch["y"])
    return total / len(chosen)


@torch.no_grad()
def sample(model: Any, y: torch.Tensor | None, noise: torch.Tensor, steps: int = 50, guidance: float = 2.0) -> torch.Tensor:
    """Pictures in [-1, 1] of the classes `y`, or of none (the null condition), from the given noise, without further randomness."""
    left = signal_left()
    times = torch.linspace(TIMES - 1, 0, steps).long().tolist()
    x = noise
    for now, then in zip(times, [*times[1:], None], strict=True):
        at = torch.full((len(x),), now)
        predicted: torch.Tensor = model(x, at, clf_free=True, null=True)
        if y is not None:
            predicted = predicted + (1 + guidance) * (model(x, at, y, clf_free=True) - predicted)
        clean: torch.Tensor = ((x - (1 - left[now]).sqrt() * predicted) / left[now].sqrt()).clamp(-1, 1)
        if then is None:
            return clean
        predicted = (x - left[now].sqrt() * clean) / (1 - left[now]).sqrt()
        x = left[then].sqrt() * clean + (1 - left[then]).sqrt() * predicted
    raise ValueError("steps must be at least 1.")
