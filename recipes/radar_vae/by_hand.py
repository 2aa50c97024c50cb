"""The documented hand fixes as steps, so that each can be measured and predicted alone and with the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import memfit
from memfit.step.running import Part
from recipes.radar_vae.data import Grid
from recipes.radar_vae.train_latent_diffusion import make_step


def make_by_hand(
    vae_type: str, batch: int, grid: Grid, part: int | None = None, amp: bool = False, checkpoint: bool = False
) -> memfit.Step:
    """A step with the documented fixes; `part` is the batch size under gradient accumulation (noise is then drawn part by part)."""
    step = make_step(vae_type, batch, grid, amp, checkpoint)
    if part is not None:

        def split(_phase: str, batch: Any) -> Iterator[Part]:
            return (Part(samples, len(samples) / len(batch)) for samples in batch.split(part))

        step.running.split = split
    return step
