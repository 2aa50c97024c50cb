"""Each method against c⊗c written out, in float64: outputs and all gradients, in training, in class sampling and in null sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recipes.conditional_unet.conditioning import OptimizationConfig
from recipes.conditional_unet.model import ConditionalUNet, Sizes

MODES: dict[str, dict[str, Any]] = {"training": {"threshold": 0.3}, "class": {"clf_free": True}, "null": {"clf_free": True, "null": True}}
SMALL = Sizes(image_size=8, model_channels=32, attention_resolutions=(4,))


@dataclass(frozen=True)
class Difference:
    """Of outputs: of their norm. Of gradients: the worst parameter's, of its norm and a hundredth of all norms. NaN: one is not finite."""

    output: float
    gradients: float


def difference(method: str, mode: str, samples: int = 32) -> Difference:
    """A batch of 32 and ten classes, so labels repeat; the threshold drops some of them."""
    torch.manual_seed(0)
    plain = ConditionalUNet(SMALL).double()
    config = OptimizationConfig(memory_optimization=True, optimization_method=method)
    other = ConditionalUNet(SMALL, config).double()
    other.load_state_dict(plain.state_dict())
    x, times = torch.randn(samples, 3, 8, 8, dtype=torch.float64), torch.randint(0, 1000, (samples,))
    y = torch.arange(samples) % 10
    (out, gradients), (out_other, gradients_other) = (_run(model, x, times, y, MODES[mode]) for model in (plain, other))
    return Difference(float((out_other - out).norm() / out.norm()), worst(gradients, gradients_other))


def _run(
    model: ConditionalUNet, x: torch.Tensor, times: torch.Tensor, y: torch.Tensor, mode: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)  # the same conditions are dropped
    out = model(x, times, y, **mode)
    out.square().mean().backward()
    return out.detach(), {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def worst(gradients: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a parameter's gradient."""
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    errors = torch.stack([(others[name] - g).norm() / (g.norm() + 0.01 * total) for name, g in gradients.items()])
    return float(errors.max())  # NaN if any is
