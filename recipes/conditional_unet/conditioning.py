"""The condition as the attention blocks get it: c⊗c written out, by one of the documented methods, or through c alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from memfit.errors import MemfitError
from memfit.levers.outer_product import factored
from memfit.ops.documented_outer_products import chunked, conditional, low_rank
from memfit.ops.outer_product import FactoredContext

METHODS = ("conditional", "low_rank", "chunked", "factored", "none")
Context = torch.Tensor | FactoredContext | None


@dataclass(frozen=True)
class OptimizationConfig:
    """The documented keys. Without `memory_optimization` the method does not matter: c⊗c is written out."""

    memory_optimization: bool = False
    optimization_method: str = "none"
    low_rank_ratio: float = 0.125
    chunk_size: int = 8
    use_fp16: bool = False
    use_checkpoint: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.optimization_method not in METHODS:
            faults.append(f"optimization_method is {self.optimization_method!r}, and must be one of {', '.join(METHODS)}")
        if not 0 < self.low_rank_ratio <= 1:
            faults.append(f"low_rank_ratio is {self.low_rank_ratio}, and must be above 0 and at most 1")
        if self.chunk_size < 1:
            faults.append(f"chunk_size is {self.chunk_size}, and must be at least 1")
        if faults:
            raise MemfitError("; ".join(faults) + ".")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> OptimizationConfig:
        """From a dict as documented; keys that nobody reads are refused.

        >>> OptimizationConfig.of({"memory_optimization": True, "optimization_method": "factored"}).method
        'factored'
        """
        known = [field.name for field in fields(cls)]
        if unknown := [key for key in settings if key not in known]:
            raise MemfitError(f"optimization_config has no {', '.join(map(repr, unknown))}: its keys are {', '.join(known)}.")
        return cls(**settings)

    @property
    def method(self) -> str:
        """The method in force."""
        return self.optimization_method if self.memory_optimization else "none"


PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "conservative": {"memory_optimization": True, "optimization_method": "conditional", "use_fp16": True, "use_checkpoint": True},
    "aggressive": {
        "memory_optimization": True,
        "optimization_method": "low_rank",
        "low_rank_ratio": 0.125,
        "use_fp16": True,
        "use_checkpoint": True,
        "chunk_size": 8,
    },
    "factored": {"memory_optimization": True, "optimization_method": "factored"},
}


class ConditionProduct(nn.Module):
    """[B, E] conditions to what attention reads their products from. A module of its own, so that memfit can exchange its forward."""

    def __init__(self, config: OptimizationConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, cemb: torch.Tensor) -> Context:
        """c⊗c, by the configured method."""
        match self.config.method:
            case "conditional":
                return conditional(cemb)
            case "low_rank":
                return low_rank(cemb, self.config.low_rank_ratio)
            case "chunked":
                return chunked(cemb, self.config.chunk_size)
            case "factored":
                return FactoredContext(cemb)
        return torch.einsum("ab,ac -> abc", cemb, cemb)


factored(ConditionProduct, lambda module: FactoredContext)
