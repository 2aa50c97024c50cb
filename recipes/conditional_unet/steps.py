"""The training step, in the sizes and forms that are trained, measured and simulated; and the batch size that a memory allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.largest_batch import largest_batch
from memfit.levers import LEVERS
from memfit.ops.attention import fused_attention, in_chunks_of
from memfit.records import Option
from memfit.units import parse_bytes
from recipes.conditional_unet.conditioning import OptimizationConfig
from recipes.conditional_unet.diffusion import denoising_loss
from recipes.conditional_unet.model import ConditionalUNet, Sizes, written_out

KERNELS = {"written out": written_out, "fused": fused_attention, "chunks": in_chunks_of(256)}  # factored attention has 256 rows, too
_FLOAT16 = Option("precision", "float16 autocast", "rounded", {"dtype": "float16"})
_SAMPLE = 4  # samples that a prediction starts from


def build_step(
    sizes: Sizes,
    config: OptimizationConfig,
    batch: dict[str, torch.Tensor],
    threshold: float = 0.1,
    lr: float = 2e-4,
    kernel: str = "written out",
    device: torch.device | None = None,
) -> memfit.Step:
    """Model, loss and optimizer. `use_fp16` is autocast with float32 weights and a scaled loss: `model.half()` would lose small updates."""
    model = ConditionalUNet(sizes, config, KERNELS[kernel]).to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    step = memfit.Step(model, denoising_loss(threshold), torch.optim.AdamW(model.parameters(), lr=lr), batch)
    if config.use_fp16:
        LEVERS["precision"].apply(step, _FLOAT16)
    return step


def sample_batch(sizes: Sizes, samples: int) -> dict[str, torch.Tensor]:
    """Noise with classes, in the shape of a batch; labels repeat, as they do in training."""
    classes = torch.arange(samples) % (sizes.num_classes or 1)
    return {"x": torch.randn(samples, 3, sizes.image_size, sizes.image_size), "y": classes}


def step_of(samples: int, kernel: str = "written out", optimization: dict[str, Any] | None = None, **sizes: Any) -> memfit.Step:
    """A step on noise, from plain settings: what tables and predictions are made of. Weights are the same each time."""
    torch.manual_seed(0)
    chosen = Sizes(**sizes)
    return build_step(chosen, OptimizationConfig.of(optimization or {}), sample_batch(chosen, samples), kernel=kernel)


GUIDED_DIFFUSION: dict[str, Any] = {"channel_mult": (1, 2, 2, 2), "num_res_blocks": 2, "attention_resolutions": (16, 8)}
"""The usual UNet for 32×32 images, 128 channels: a GPU's size. The document names none beside the 512 of its embedding."""


def get_optimal_batch_size(available: str | float, sizes: Sizes | None = None, config: OptimizationConfig | None = None) -> int:
    """The largest batch whose predicted process stays inside `available`: gigabytes as documented, or "6GiB". 0: not even one.

    `conditional` looks at values, which a prediction does not have: it is asked as `chunked`, which for a moment also holds c⊗c twice.
    """
    sizes, config = sizes or Sizes(), config or OptimizationConfig()
    asked = replace(config, optimization_method="chunked") if config.method == "conditional" else config
    budget = parse_bytes(available) if isinstance(available, str) else int(available * 10**9)
    step = built_without_memory(lambda: build_step(sizes, asked, sample_batch(sizes, _SAMPLE)))
    return largest_batch(step, budget, levers={}).plain
