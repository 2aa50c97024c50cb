"""The documented hand fixes as steps, so that each can be measured and predicted alone and with the others."""

from __future__ import annotations

import memfit
from recipes.radar_vae.data import Grid
from recipes.radar_vae.stages import accumulate
from recipes.radar_vae.train_latent_diffusion import make_step


def make_by_hand(
    vae_type: str, batch: int, grid: Grid, part: int | None = None, amp: bool = False, checkpoint: bool = False
) -> memfit.Step:
    """A step with the documented fixes; `part` is the batch size under gradient accumulation (noise is then drawn part by part)."""
    step = make_step(vae_type, batch, grid, amp, checkpoint)
    return step if part is None else accumulate(step, part)
