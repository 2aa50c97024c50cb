"""Denoising diffusion: the loss of a batch, and pictures out of noise with classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
        times, noise, noisy = noised(batch["x"])
        predicted: torch.Tensor = model(noisy, times, batch["y"], threshold=threshold)
        return (predicted - noise).pow(2).mean()

    return loss


def noised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A time for each picture, noise, and the pictures with that much of it."""
    times = torch.randint(0, TIMES, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    left = signal_left().to(x.device)[times].view(-1, 1, 1, 1)
    return times, noise, left.sqrt() * x + (1 - left).sqrt() * noise


@torch.no_grad()
def validation_loss(model: Any, images: Images, size: int, threshold: float, one_by_one: bool = False) -> float:
    """Over at most 512 held-out pictures, with the same times, noise and dropped classes every time.

    A batch that is trained in parts to fit a budget would not fit as a whole here either: `one_by_one` takes its pictures one at a time.
    """
    loss = partial(_one_by_one_loss, threshold) if one_by_one else denoising_loss(threshold)
    total, chosen = 0.0, torch.arange(images.training, len(images.x))[:512]
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for batch in images.batches(size, chosen):
            total += float(loss(model, {name: tensor.to(device) for name, tensor in batch.items()})) * len(batch["y"])
    return total / len(chosen)


def _one_by_one_loss(threshold: float, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """From the same random numbers as the whole batch's. `low_rank` and `conditional` look at a batch: here at one picture."""
    times, noise, noisy = noised(batch["x"])
    dropped = (torch.rand(len(times), device=times.device) < threshold).tolist()  # as the model does in training
    each = zip(noisy.split(1), times.split(1), batch["y"].split(1), dropped, strict=True)
    predicted = torch.cat([model(x, at, y, clf_free=True, null=null) for x, at, y, null in each])
    return (predicted - noise).pow(2).mean()


@torch.no_grad()
def sample(model: Any, y: torch.Tensor | None, noise: torch.Tensor, steps: int = 50, guidance: float = 2.0) -> torch.Tensor:
    """Pictures in [-1, 1] of the classes `y`, or of none (the null condition), from the given noise, without further randomness."""
    left = signal_left()
    times = torch.linspace(TIMES - 1, 0, steps).long().tolist()
    x = noise
    for now, then in zip(times, [*times[1:], None], strict=True):
        at = torch.full((len(x),), now, device=x.device)
        predicted: torch.Tensor = model(x, at, clf_free=True, null=True)
        if y is not None:
            predicted = predicted + (1 + guidance) * (model(x, at, y, clf_free=True) - predicted)
        clean: torch.Tensor = ((x - (1 - left[now]).sqrt() * predicted) / left[now].sqrt()).clamp(-1, 1)
        if then is None:
            return clean
        predicted = (x - left[now].sqrt() * clean) / (1 - left[now]).sqrt()
        x = left[then].sqrt() * clean + (1 - left[then]).sqrt() * predicted
    raise ValueError("steps must be at least 1.")
