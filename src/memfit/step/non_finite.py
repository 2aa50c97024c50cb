"""Names the module in which a NaN or an infinity first appears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from memfit.step.batches import tensors_in


def first_non_finite(run: Callable[[], Any], name_of: Callable[[nn.Module], str]) -> str | None:
    """Run forward passes again and name the first module whose output is not finite although its inputs are.

    >>> net = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
    >>> _ = nn.init.constant_(net[1].weight, float("inf"))
    >>> first_non_finite(lambda: net(torch.ones(1, 1)), lambda module: "1" if module is net[1] else "0")
    '1 (Linear)'
    """
    found: list[str] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if not found and not is_finite(output) and is_finite(args):
            found.append(f"{name_of(module) or 'the model'} ({type(module).__name__})")

    handle = register_module_forward_hook(look)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return found[0] if found else None


def is_finite(values: Any) -> bool:
    """Whether a nest of tensors holds only finite numbers."""
    return all(bool(torch.isfinite(t).all()) for _, t in tensors_in(values) if t.is_floating_point())
