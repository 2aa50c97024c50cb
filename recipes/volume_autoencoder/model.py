"""The networks and the two losses: a generator's, then a discriminator's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets.autoencoderkl import AutoencoderKL
from monai.networks.nets.patchgan_discriminator import PatchDiscriminator
from torch import nn
from torch.nn import functional as F

import memfit
from recipes.volume_autoencoder.config import Config
from recipes.volume_autoencoder.perceptual import SlicePerceptualLoss

KL_WEIGHT, ADVERSARIAL_WEIGHT, PERCEPTUAL_WEIGHT = 1e-6, 0.01, 0.001  # as in MONAI's tutorial of the 3D autoencoder
Models = Mapping[str, nn.Module]


def build_models(config: Config, perceptual_weights: Path | None = None) -> dict[str, nn.Module]:
    """The autoencoder, the discriminator (MONAI's, with its BatchNorm) and, if configured, the frozen perceptual network."""
    own = config.autoencoder
    models: dict[str, nn.Module] = {
        "autoencoder": AutoencoderKL(
            spatial_dims=3,
            channels=own.num_channels,
            num_res_blocks=1,
            latent_channels=3,
            norm_num_groups=own.norm_num_groups,
            attention_levels=own.attention_levels,
            use_checkpoint=own.training.use_gradient_checkpointing,
        ),
        "discriminator": PatchDiscriminator(
            spatial_dims=3,
            channels=own.training.discriminator.num_channels,
            in_channels=1,
            num_layers_d=own.training.discriminator.num_layers_d,
        ),
    }
    if own.training.use_perceptual_loss:
        models["perceptual"] = SlicePerceptualLoss(perceptual_weights)
    return models


def generator_terms(models: Models, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The generator's loss on some volumes, and their reconstruction."""
    reconstruction, mean, sigma = models["autoencoder"](x)
    divergence = 0.5 * (mean.pow(2) + sigma.pow(2) - sigma.pow(2).log() - 1).sum((1, 2, 3, 4)).mean()
    fooled = _least_squares(models["discriminator"](reconstruction)[-1], 1.0)
    loss = F.l1_loss(reconstruction, x) + KL_WEIGHT * divergence + ADVERSARIAL_WEIGHT * fooled
    if "perceptual" in models:
        loss = loss + PERCEPTUAL_WEIGHT * models["perceptual"](reconstruction, x)
    return loss, reconstruction


def discriminator_terms(models: Models, x: torch.Tensor, reconstruction: torch.Tensor) -> torch.Tensor:
    """How badly the discriminator tells real volumes from reconstructed ones."""
    judge = models["discriminator"]
    return 0.5 * (_least_squares(judge(reconstruction)[-1], 0.0) + _least_squares(judge(x)[-1], 1.0))


def _least_squares(logits: torch.Tensor, wanted: float) -> torch.Tensor:
    """MONAI's PatchAdversarialLoss("least_squares")."""
    return (F.leaky_relu(logits, 0.05) - wanted).pow(2).mean()


class Losses:
    """Both losses of a step. `size` is the documented batch_size: larger batches are accumulated in parts of it, each with a backward of
    its own and BatchNorm statistics of its own, as `gradient_accumulation_steps` means it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def generator(self, models: Models, batch: torch.Tensor, carry: dict[str, Any]) -> torch.Tensor:
        """The first phase; it leaves the reconstructions to the second."""
        made: list[torch.Tensor] = []

        def part(x: torch.Tensor) -> torch.Tensor:
            loss, reconstruction = generator_terms(models, x)
            made.append(reconstruction.detach())
            return loss

        loss = self._accumulated(part, batch, parameters=[models["autoencoder"], models["discriminator"]])
        carry["reconstruction"] = made[0] if len(made) == 1 else torch.cat(made)
        return loss

    def discriminator(self, models: Models, batch: torch.Tensor, carry: dict[str, Any]) -> torch.Tensor:
        """The second phase."""

        def part(x: torch.Tensor, reconstruction: torch.Tensor) -> torch.Tensor:
            return discriminator_terms(models, x, reconstruction)

        return self._accumulated(part, batch, carry["reconstruction"], parameters=[models["discriminator"]])

    def _accumulated(self, part: Callable[..., torch.Tensor], *tensors: torch.Tensor, parameters: list[nn.Module]) -> torch.Tensor:
        if len(tensors[0]) <= self.size:
            return part(*tensors)
        return memfit.chunked(part, *tensors, size=self.size, parameters=parameters)


def build_step(
    config: Config, batch: torch.Tensor, models: dict[str, nn.Module] | None = None, learning_rate: float = 1e-4, **more: Any
) -> memfit.Step:
    """One training step: two phases, two optimizers."""
    models = models or build_models(config)
    losses = Losses(config.autoencoder.training.batch_size)
    optimizers = {name: torch.optim.Adam(models[name].parameters(), learning_rate) for name in ("autoencoder", "discriminator")}
    phases = [
        memfit.Phase("generator", losses.generator, optimizers["autoencoder"]),
        memfit.Phase("discriminator", losses.discriminator, optimizers["discriminator"]),
    ]
    return memfit.Step(models, batch=batch, phases=phases, **more)
