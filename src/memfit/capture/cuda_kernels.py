"""Calls that keep other tensors on CUDA than on a CPU, exchanged for CUDA's form while a step is simulated."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_DIFFERENTIATE = (torch.Tensor.backward, torch.autograd.grad)
_ENGINE: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)  # what both call; without it checkpoints are not followed


class cuda_kernels(TorchFunctionMode):
    """Dropout keeps a mask of bytes (a CPU keeps floats); attention runs fused, with dropout too (a CPU then makes the maps)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATE and _ENGINE is not None and _is_plain(args[0], kwargs):
            with self:  # torch takes a mode off while it handles a call, and in these a checkpoint runs its region again
                return _differentiated(*map(_tuple, args), unused=bool(kwargs.get("allow_unused")))
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch.dropout or (func is F.dropout and not kwargs.get("inplace")):
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _is_plain(losses: Any, kwargs: dict[str, Any]) -> bool:
    """Numbers are differentiated, and nothing special is asked for; all else, errors included, is torch's own business."""
    usual = all(value is None or value is False for name, value in kwargs.items() if name not in ("allow_unused", "only_inputs"))
    return usual and all(loss.numel() == 1 for loss in _tuple(losses))


def _tuple(tensors: Any) -> tuple[torch.Tensor, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def _differentiated(losses: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...] = (), *, unused: bool) -> Any:
    """`loss.backward()`, or the gradients of inputs, without asking a mode once more."""
    ones = tuple(map(torch.ones_like, losses))
    if not inputs:
        return _ENGINE(losses, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
    return _ENGINE(losses, ones, False, False, inputs, unused, accumulate_grad=False)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None) -> Any:
    on = training if train is None else train
    return torch.native_dropout(input, p, on)[0] if on and p else input


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        times = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.size(-2))
        attn_mask = query.new_empty(attn_mask.shape) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = attn_mask.expand(shape)
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
