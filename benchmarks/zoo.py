"""Public models with random weights, as training steps: what the accuracy of predictions is measured on.

A row is `model-b<batch>-<optimizer>-<precision>[-drop]`. Every row's name is also a function of this module, so that
`memfit profile benchmarks/zoo.py:gpt2-b4-adamw-fp32-drop --simulate` works.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memfit import Step

_DROPOUT = 0.1
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}


@dataclass(frozen=True)
class _Recipe:
    """How to make a model, `package:class`, the batch it takes and its loss; `dropouts` are the options that switch dropout on."""

    model: str
    options: dict[str, Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    dropouts: tuple[str, ...] = ()

    def build(self, dropout: float) -> torch.nn.Module:
        package, name = self.model.split(":")
        kind = getattr(importlib.import_module(package), name)
        options = self.options | dict.fromkeys(self.dropouts, dropout)
        return (kind(kind.config_class(**options)) if package == "transformers" else kind(**options)).train()


def _reconstruction(model: Any, images: Tensor) -> Tensor:
    output, mean, sigma = model(images)
    return F.l1_loss(output.float(), images) + 1e-6 * (mean.square() + sigma.square() - sigma.square().log() - 1).mean()


def _posterior_reconstruction(model: Any, images: Tensor) -> Tensor:
    posterior = model.encode(images).latent_dist
    return F.mse_loss(model.decode(posterior.sample()).sample.float(), images) + 1e-6 * posterior.kl().mean()


def _segmentation(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]).float(), batch["label"])


def _denoising(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(**{k: v for k, v in batch.items() if k != "noise"}).sample.float(), batch["noise"])


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _images(*size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.rand(n, *size)


def _labelled(*size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"image": torch.rand(n, 1, *size), "label": torch.randint(0, 4, (n, *size))}


def _noisy(*size: int, **conditions: tuple[int, ...]) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"sample": torch.randn(n, *size), "timestep": torch.randint(0, 1000, (n,)), "noise": torch.randn(n, *size)} | {
        name: torch.randn(n, *shape) for name, shape in conditions.items()
    }


def _words(length: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: dict.fromkeys(("input_ids", "labels"), torch.randint(0, _VOCABULARY, (n, length)))


def _photos(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {"pixel_values": torch.rand(n, 3, size, size), "labels": torch.randint(0, 2, (n,))}


_VOCABULARY = 8000
_WORDS = dict(vocab_size=_VOCABULARY, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6)
_T5 = dict(vocab_size=_VOCABULARY, d_model=320, d_ff=1280, num_layers=4, num_heads=5, decoder_start_token_id=0)
_VIT = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, image_size=192)
_KL3D = dict(spatial_dims=3, channels=(16, 32, 64), num_res_blocks=1, latent_channels=4, norm_num_groups=8) | dict(
    attention_levels=(False,) * 3, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False
)
_KL2D = dict(spatial_dims=2, channels=(32, 64, 64), num_res_blocks=1, latent_channels=4, attention_levels=(False,) * 3)
_UNET = dict(in_channels=1, out_channels=4, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
_UNETR = dict(in_channels=1, out_channels=4, img_size=(64, 64, 48), feature_size=8, hidden_size=192, mlp_dim=768, num_heads=6)
_DIFFUSION = dict(block_out_channels=(32, 64, 128, 128), norm_num_groups=16)
_POSTERIOR = dict(block_out_channels=(32, 64, 64), norm_num_groups=16, latent_channels=4) | dict(
    down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3
)
_IN_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_M, _D, _T = "monai.networks.nets", "diffusers", "transformers"

_RECIPES = {
    "monai_kl3d": _Recipe(f"{_M}:AutoencoderKL", _KL3D, _images(1, 96, 96, 64), _reconstruction),
    "monai_kl2d": _Recipe(f"{_M}:AutoencoderKL", _KL2D, _images(1, 128, 128), _reconstruction),
    "monai_unet2d": _Recipe(f"{_M}:UNet", _UNET | dict(spatial_dims=2, norm="BATCH"), _labelled(256, 256), _segmentation, ("dropout",)),
    "monai_unet3d": _Recipe(f"{_M}:UNet", _UNET | dict(spatial_dims=3), _labelled(96, 96, 96), _segmentation, ("dropout",)),
    "swin_unetr": _Recipe(f"{_M}:SwinUNETR", dict(in_channels=1, out_channels=4, feature_size=12), _labelled(64, 64, 64), _segmentation,
                          ("drop_rate", "attn_drop_rate", "dropout_path_rate")),
    "unetr": _Recipe(f"{_M}:UNETR", _UNETR, _labelled(64, 64, 48), _segmentation, ("dropout_rate",)),
    "unet2d": _Recipe(f"{_D}:UNet2DModel", _DIFFUSION | dict(attention_head_dim=16), _noisy(3, 64, 64), _denoising, ("dropout",)),
    "unet2d_condition": _Recipe(f"{_D}:UNet2DConditionModel", _DIFFUSION | dict(cross_attention_dim=128),
                                _noisy(4, 32, 32, encoder_hidden_states=(77, 128)), _denoising, ("dropout",)),
    "diffusers_kl": _Recipe(f"{_D}:AutoencoderKL", _POSTERIOR, _images(3, 128, 128), _posterior_reconstruction),
    "gpt2": _Recipe(f"{_T}:GPT2LMHeadModel", _WORDS, _words(256), _own_loss, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "bert": _Recipe(f"{_T}:BertForMaskedLM", _WORDS, _words(256), _own_loss, _IN_BERT),
    "llama": _Recipe(f"{_T}:LlamaForCausalLM", _WORDS | dict(num_key_value_heads=2), _words(256), _own_loss, ("attention_dropout",)),
    "t5": _Recipe(f"{_T}:T5ForConditionalGeneration", _T5, _words(192), _own_loss, ("dropout_rate",)),
    "vit": _Recipe(f"{_T}:ViTForImageClassification", _VIT, _photos(192), _own_loss, _IN_BERT),
    "convnext": _Recipe(f"{_T}:ConvNextForImageClassification", dict(hidden_sizes=(48, 96, 192, 384), depths=(2, 2, 4, 2)), _photos(160),
                        _own_loss, ("drop_path_rate",)),
    "resnet": _Recipe(f"{_T}:ResNetForImageClassification", dict(hidden_sizes=(128, 256, 512, 1024), depths=(2, 3, 3, 2)), _photos(160), _own_loss),
}

ROWS = [
    f"{model}-{row}"
    for model, rows in {
        "monai_kl3d": "b1-adamw-fp32 b1-sgd-fp32 b1-adamw_fused-bf16",
        "monai_kl2d": "b4-adam-fp32 b16-adamw_foreach-fp32 b8-momentum-bf16",
        "monai_unet2d": "b4-momentum-fp32 b8-adamw-fp32-drop b16-adamw_fused-bf16-drop",
        "monai_unet3d": "b1-adamw-fp32 b2-momentum-fp32-drop b1-adam-bf16-drop",
        "swin_unetr": "b1-adamw-fp32 b2-adamw_foreach-fp32-drop",
        "unetr": "b1-adamw-fp32 b3-momentum-fp32-drop b2-adamw_fused-bf16",
        "unet2d": "b2-adamw-fp32-drop b8-adamw_fused-fp32 b4-adam-bf16",
        "unet2d_condition": "b2-adamw_foreach-fp32 b8-adamw-fp32-drop b4-momentum-bf16",
        "diffusers_kl": "b2-adam-fp32 b6-adamw_fused-fp32",
        "gpt2": "b1-adamw-fp32 b4-adamw_foreach-fp32-drop b8-sgd-fp32-drop b4-adamw_fused-bf16-drop",
        "bert": "b2-adamw_fused-fp32 b8-adam-fp32-drop b4-adamw_foreach-bf16",
        "llama": "b2-adamw-fp32 b8-adamw_foreach-fp32 b4-adamw-bf16-drop",
        "t5": "b2-adamw-fp32-drop b8-momentum-fp32",
        "vit": "b4-adamw-fp32 b16-adamw_foreach-fp32-drop b8-sgd-bf16",
        "convnext": "b4-adamw_fused-fp32 b16-momentum-fp32-drop b8-adamw-bf16",
        "resnet": "b4-momentum-fp32 b16-adamw_foreach-fp32 b8-adamw-bf16",
    }.items()
    for row in rows.split()
]


def make_step(row: str = ROWS[0]) -> Step:
    """The step that a row's name stands for; any combination of a model, batch size, optimizer and precision is one."""
    name, count, optimizer, precision, *dropout = row.split("-")
    recipe = _RECIPES[name]
    torch.manual_seed(0)
    model = recipe.build(_DROPOUT if dropout else 0.0)
    loss = partial(_in_bfloat16, recipe.loss) if precision == "bf16" else recipe.loss
    return Step(model, loss, _OPTIMIZERS[optimizer](model.parameters()), recipe.batch(int(count.removeprefix("b"))))


def _in_bfloat16(loss: Callable[[Any, Any], Tensor], model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss(model, batch)


def __getattr__(name: str) -> Callable[[], Step]:
    if name in ROWS:
        return partial(make_step, name)
    raise AttributeError(name)
