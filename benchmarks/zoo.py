"""Public models with random weights, as training steps: what the accuracy of predictions is measured on.

A row is `model-b<batch>-<optimizer>-<precision>[-drop]`. Every row's name is also a function of this module, so that
`memfit profile benchmarks/zoo.py:gpt2-b1-adamw-fp32 --simulate` works. MONAI's transformers need einops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memfit import Step

Recipe = tuple[str, dict[str, Any], str, "Task", str]  # package:class, options, those that switch dropout on, the task, the rows
Task = tuple[Callable[[int], Any], Callable[[Any, Any], Tensor]]  # a batch of so many samples, and the loss on it
_DROPOUT, _CLASSES, _VOCABULARY = 0.1, 4, 8000
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}


def _reconstructing(*size: int) -> Task:
    def loss(model: Any, images: Tensor) -> Tensor:
        output, mean, sigma = model(images)
        divergence: Tensor = (mean.square() + sigma.square() - sigma.square().log() - 1).mean()
        return F.l1_loss(output.float(), images) + 1e-6 * divergence

    return lambda n: torch.rand(n, *size), loss


def _coding(*size: int) -> Task:
    return lambda n: torch.rand(n, *size), lambda m, x: F.mse_loss(m(x, sample_posterior=True).sample.float(), x)


def _segmenting(*size: int) -> Task:
    return (
        lambda n: {"image": torch.rand(n, 1, *size), "label": torch.randint(0, _CLASSES, (n, *size))},
        lambda model, batch: F.cross_entropy(model(batch["image"]).float(), batch["label"]),
    )


def _denoising(*size: int, **conditions: tuple[int, ...]) -> Task:
    sizes = {"sample": size, "noise": size} | conditions
    return (
        lambda n: {"timestep": torch.randint(0, 1000, (n,))} | {name: torch.randn(n, *shape) for name, shape in sizes.items()},
        lambda model, batch: F.mse_loss(model(**{k: v for k, v in batch.items() if k != "noise"}).sample.float(), batch["noise"]),
    )


def _reading(length: int) -> Task:
    return lambda n: dict.fromkeys(("input_ids", "labels"), torch.randint(0, _VOCABULARY, (n, length))), lambda m, b: m(**b).loss


def _recognising(size: int) -> Task:
    return lambda n: {"pixel_values": torch.rand(n, 3, size, size), "labels": torch.zeros(n, dtype=torch.long)}, lambda m, b: m(**b).loss


_M, _D, _T = "monai.networks.nets:", "diffusers:", "transformers:"
_UNATTENTIVE = dict(attention_levels=(False,) * 3, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False)
_KL = dict(spatial_dims=3, channels=(16, 32, 64), num_res_blocks=(1, 1, 1), latent_channels=4, norm_num_groups=16)
_KL2D = _KL | dict(spatial_dims=2, attention_levels=(False, False, True))
_VOLUMES = dict(in_channels=1, out_channels=_CLASSES)
_UNET = _VOLUMES | dict(spatial_dims=3, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
_UNETR = _VOLUMES | dict(img_size=(64, 64, 48), feature_size=8, hidden_size=192, mlp_dim=768, num_heads=6)
_DIFFUSION = dict(block_out_channels=(32, 64, 128, 128), norm_num_groups=16, attention_head_dim=16)
_BLOCKS = dict(down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3)
_CODER = dict(block_out_channels=(32, 64, 64), norm_num_groups=16) | _BLOCKS
_LANGUAGE = dict(vocab_size=_VOCABULARY, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6)
_T5 = dict(vocab_size=_VOCABULARY, d_model=320, d_ff=1280, num_layers=4, num_heads=5, decoder_start_token_id=0)
_VIT = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, image_size=192)
_STAGES = dict(hidden_sizes=(64, 128, 256, 512), depths=(2, 2, 4, 2))
_BERTS = "hidden_dropout_prob attention_probs_dropout_prob"

# fmt: off
_RECIPES: dict[str, Recipe] = {
    "monai_kl3d": (_M + "AutoencoderKL", _KL | _UNATTENTIVE, "", _reconstructing(1, 96, 96, 64), "b1-adamw-fp32"),
    "monai_kl3d_small": (_M + "AutoencoderKL", _KL | _UNATTENTIVE, "", _reconstructing(1, 64, 64, 48),
                         "b1-momentum-fp32 b2-adamw_foreach-fp32 b1-adamw_fused-bf16"),
    "monai_kl2d": (_M + "AutoencoderKL", _KL2D, "", _reconstructing(1, 128, 128), "b4-adam-fp32 b12-adamw_foreach-fp32 b8-momentum-bf16"),
    "monai_unet2d": (_M + "UNet", _UNET | dict(spatial_dims=2, norm="BATCH"), "dropout", _segmenting(256, 256),
                     "b4-momentum-fp32 b8-adamw-fp32-drop b16-adamw_fused-bf16-drop"),
    "monai_unet3d": (_M + "UNet", _UNET, "dropout", _segmenting(80, 80, 80), "b1-adamw-fp32 b2-momentum-fp32-drop b1-adam-bf16-drop"),
    "monai_unetr": (_M + "UNETR", _UNETR, "dropout_rate", _segmenting(64, 64, 48),
                    "b1-adamw-fp32 b3-momentum-fp32-drop b2-adamw_fused-bf16"),
    "monai_swin": (_M + "SwinUNETR", _VOLUMES | dict(feature_size=12, depths=(1, 1, 1, 1)), "drop_rate attn_drop_rate dropout_path_rate",
                   _segmenting(64, 64, 32), "b1-adamw-fp32 b2-adamw_foreach-fp32-drop"),
    "diffusers_unet": (_D + "UNet2DModel", _DIFFUSION, "dropout", _denoising(3, 64, 64),
                       "b2-adamw-fp32-drop b8-adamw_fused-fp32 b4-adam-bf16"),
    "diffusers_conditioned": (_D + "UNet2DConditionModel", _DIFFUSION | dict(cross_attention_dim=128), "dropout",
                              _denoising(4, 32, 32, encoder_hidden_states=(77, 128)),
                              "b4-adamw_foreach-fp32 b12-adamw-fp32-drop b6-momentum-bf16"),
    "diffusers_kl": (_D + "AutoencoderKL", _CODER, "", _coding(3, 128, 128), "b2-adam-fp32 b6-adamw_fused-fp32"),
    "gpt2": (_T + "GPT2LMHeadModel", _LANGUAGE, "resid_pdrop embd_pdrop attn_pdrop", _reading(256),
             "b1-adamw-fp32 b4-adamw_foreach-fp32-drop b8-sgd-fp32-drop b4-adamw_fused-bf16-drop"),
    "bert": (_T + "BertForMaskedLM", _LANGUAGE, _BERTS, _reading(256), "b2-adamw_fused-fp32 b8-adam-fp32-drop b4-adamw_foreach-bf16"),
    "llama": (_T + "LlamaForCausalLM", _LANGUAGE | dict(num_key_value_heads=2), "attention_dropout", _reading(256),
              "b2-adamw-fp32 b8-adamw_foreach-fp32 b4-adamw-bf16-drop"),
    "t5": (_T + "T5ForConditionalGeneration", _T5, "dropout_rate", _reading(192), "b2-adamw-fp32-drop b8-momentum-fp32"),
    "vit": (_T + "ViTForImageClassification", _VIT, _BERTS, _recognising(192), "b4-adamw-fp32 b16-adamw_foreach-fp32-drop b8-sgd-bf16"),
    "convnext": (_T + "ConvNextForImageClassification", _STAGES, "drop_path_rate", _recognising(160),
                 "b4-adamw_fused-fp32 b16-momentum-fp32-drop b8-adamw-bf16"),
    "resnet": (_T + "ResNetForImageClassification", _STAGES, "", _recognising(160),
               "b16-momentum-fp32 b48-adamw_foreach-fp32 b32-adamw-bf16"),
}
# fmt: on

ROWS = [f"{model}-{row}" for model, (*_, rows) in _RECIPES.items() for row in rows.split()]


def make_step(row: str = ROWS[0]) -> Step:
    """The step that a row's name stands for; any combination of a model, batch size, optimizer and precision is one."""
    name, count, optimizer, precision, *dropout = row.split("-")
    kind, options, dropouts, (make_batch, loss), _ = _RECIPES[name]
    torch.manual_seed(0)
    model = _build(kind, options | dict.fromkeys(dropouts.split(), _DROPOUT if dropout else 0.0))

    def loss_as_precise(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
            return loss(model, batch)

    return Step(model, loss_as_precise, _OPTIMIZERS[optimizer](model.parameters()), make_batch(int(count.removeprefix("b"))))


def _build(path: str, options: dict[str, Any]) -> torch.nn.Module:
    package, name = path.split(":")
    kind = getattr(importlib.import_module(package), name)
    model: torch.nn.Module = kind(kind.config_class(**options)) if package == "transformers" else kind(**options)
    return model.train()


def __getattr__(name: str) -> Callable[[], Step]:
    if name in ROWS:
        return partial(make_step, name)
    raise AttributeError(name)
