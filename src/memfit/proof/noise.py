"""What rounding may do to a step, made on purpose: parameters, and what modules hand on, off by about their last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from memfit.proof.places import Places
from memfit.step.batches import map_tensors

_TOSSES = 65_537  # a prime, so that rows of a tensor do not get the same ones


@contextmanager
def noisy(places: Places, eps: float | None = None) -> Iterator[None]:
    """Each number up or down by `eps` of itself, or by that of its own type. Parameters stay moved; modules are only listened to."""
    coins = Coins(eps)
    with torch.no_grad():
        for parameter in places.parameters:
            if parameter.is_floating_point():
                parameter.copy_(coins.move(parameter))
    with outputs_moved(coins):
        yield


@contextmanager
def outputs_moved(coins: Coins) -> Iterator[None]:
    """What modules hand on, moved. An op that keeps its own result (tanh, relu) keeps it beside the moved one: up to twice the memory."""
    moved: Callable[..., torch.Tensor] = _Moved.apply

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not any(True for _ in module.children()):
            return map_tensors(lambda t: moved(t, coins) if t.is_floating_point() else t, output)
        return None

    handle = register_module_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


class Coins:
    """Ups and downs, tossed once and laid end to end: a fresh toss for every number would cost more than the step itself."""

    def __init__(self, eps: float | None = None) -> None:
        coin = torch.Generator().manual_seed(0)  # not the user's random numbers
        self._signs = 2 * torch.randint(0, 2, (_TOSSES,), generator=coin) - 1
        self._eps, self._at = eps, 0

    def move(self, values: torch.Tensor) -> torch.Tensor:
        """Values off by about a last bit."""
        factors = 1 + self._signs.to(values.device, values.dtype) * (self._eps or torch.finfo(values.dtype).eps)
        self._at = (self._at + 9973) % _TOSSES
        laid = factors.roll(self._at).repeat(values.numel() // _TOSSES + 1)[: values.numel()]
        return values * laid.view(values.shape)


class _Moved(torch.autograd.Function):
    """Moves values on their way forward and gradients on their way back, and keeps nothing for it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, coins: Coins) -> torch.Tensor:
        ctx.coins = coins
        return coins.move(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.coins.move(gradients[0]), None
