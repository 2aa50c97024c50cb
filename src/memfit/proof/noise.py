"""What rounding may do to a step, made on purpose: parameters, and what modules hand on, off by about their last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from memfit.batches import map_tensors
from memfit.proof.places import Places


@contextmanager
def noisy(places: Places, eps: float | None = None) -> Iterator[None]:
    """Each number up or down by `eps` of itself, or by that of its own type. Parameters stay moved; modules are only listened to."""
    coin = torch.Generator().manual_seed(0)  # not the user's random numbers
    moved: Callable[..., torch.Tensor] = _Moved.apply
    with torch.no_grad():
        for parameter in places.parameters:
            if parameter.is_floating_point():
                parameter.copy_(_off(parameter, eps, coin))

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not any(True for _ in module.children()):
            return map_tensors(lambda t: moved(t, eps, coin) if t.is_floating_point() else t, output)
        return None

    handle = register_module_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


class _Moved(torch.autograd.Function):
    """Moves values on their way forward and gradients on their way back, and keeps nothing for it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, eps: float | None, coin: torch.Generator) -> torch.Tensor:
        ctx.how = eps, coin
        return _off(values, eps, coin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _off(gradients[0], *ctx.how), None, None


def _off(values: torch.Tensor, eps: float | None, coin: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, values.shape, generator=coin, dtype=torch.int8).to(values.device)
    return values * (1 + (2 * signs - 1).to(values.dtype) * (eps or torch.finfo(values.dtype).eps))
