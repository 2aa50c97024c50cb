"""How the attention of known libraries is led through another function. Nothing is imported for it: modules are known by their names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from memfit.levers.forwards import Forward, exchange_attribute
from memfit.levers.lever import CannotApply
from memfit.levers.undo import Undo
from memfit.ops.attention import Attend

AttentionAdapter = Callable[[nn.Module, Attend], Forward | None]  # None: this module must stay as it is


def adapter_of(module: nn.Module) -> AttentionAdapter:
    """The adapter for a known library's module; for others one that leaves them alone."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
    return next((adapter for name, adapter in _KNOWN.items() if name in kinds), lambda module, attend: None)


def sdpa_within(module: nn.Module, attend: Attend) -> Forward:
    """The module's own forward, in which scaled_dot_product_attention is `attend`."""
    own = module.forward

    def attend_or_refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        _refuse_checkpoints(type(module).__name__, up_to=forward)
        return attend(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with sdpa_is(attend_or_refuse):
            return own(*args, **kwargs)

    return forward


def _refuse_checkpoints(module: str, up_to: Any) -> None:
    """What is checkpointed between a module's forward and its attention runs again in backward, where that forward is not entered."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code is not up_to.__code__:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise CannotApply(
                f"attention cannot join {module}, because {module} checkpoints its attention inside its own forward: computed again in "
                "backward, that would attend in torch's own way, with other tensors. Put the checkpoint around the call of the module, or "
                "describe the module with memfit.levers.attention.describe_attention."
            )
        frame = frame.f_back


@contextmanager
def sdpa_is(attend: Attend) -> Iterator[None]:
    """While it is entered, whoever calls scaled_dot_product_attention by torch's name calls `attend`."""
    functional: Any = torch.nn.functional
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _monai(block: Any, attend: Attend) -> Forward | None:
    """SABlock and CrossAttentionBlock; one that keeps its map, or adds positions to it, needs it."""
    if block.save_attn or block.rel_positional_embedding is not None:
        return None

    def forward(x: torch.Tensor, second: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        second = next(iter(named.values()), second)
        crosses = type(block).__name__ == "CrossAttentionBlock"
        query, key, value = _monai_inputs(block, x, second if crosses and second is not None else x)
        mask = None
        if block.causal:
            mask = block.causal_mask[:, :, : query.shape[-2], : key.shape[-2]] != 0
        elif not crosses and second is not None:
            mask = second[:, None, None] != 0
        dropout = block.drop_weights.p if block.training else 0.0
        out = block.out_rearrange(attend(query, key, value, mask, dropout, False, block.scale))
        return block.drop_output(block.out_proj(out) if getattr(block, "include_fc", True) else out)  # type: ignore[no-any-return]

    return forward


def _monai_inputs(block: Any, x: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if getattr(block, "use_combined_linear", False):
        query, key, value = block.input_rearrange(block.qkv(x))
    else:
        query = block.input_rearrange(block.to_q(x))
        key, value = (block.input_rearrange(layer(context)) for layer in (block.to_k, block.to_v))
    if block.attention_dtype is not None:
        query, key = query.to(block.attention_dtype), key.to(block.attention_dtype)
    return query, key, value


def _diffusers(block: Any, attend: Attend) -> Forward | None:
    """Attention whose processor is the plain one or torch's; others have ways of their own."""
    fused = sys.modules["diffusers.models.attention_processor"].AttnProcessor2_0
    if type(block.processor).__name__ not in ("AttnProcessor", "AttnProcessor2_0"):
        return None

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Undo() as undo, sdpa_is(attend):
            exchange_attribute(block, "processor", fused(), undo)
            return type(block).forward(block, *args, **kwargs)

    return forward


def _torch(block: Any, attend: Attend) -> Forward:
    """MultiheadAttention: without the weights it would give besides; whoever reads them is told."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(nn.MultiheadAttention.forward).bind(block, *args, **kwargs).arguments
        asked = given.pop("need_weights", True)
        given.pop("self")
        with sdpa_is(attend):
            out, _ = type(block).forward(block, **given, need_weights=False)
        return out, NotKept() if asked else None

    return forward


class NotKept:
    """Stands where MultiheadAttention would give its weights; reading it says why they are not there."""

    def __getattr__(self, name: str) -> Any:
        raise CannotApply(
            "attention was applied to a MultiheadAttention whose weights this step reads, and fused attention does not make them: "
            "leave out this lever, or call the module with need_weights=False."
        )


def eager_transformers(module: Any) -> bool:
    """A transformers model that writes its maps out and need not."""
    known = hasattr(module, "set_attn_implementation") and getattr(module, "config", None) is not None
    return known and module.config._attn_implementation in ("eager", "sdpa") and not getattr(module.config, "output_attentions", False)


def use_sdpa(module: Any, undo: Undo) -> None:
    """Its attention goes through scaled_dot_product_attention."""
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")}
    for config in configs.values():
        undo.then(setattr, config, "_attn_implementation_internal", config._attn_implementation)
    try:
        module.set_attn_implementation("sdpa")
    except (ImportError, ValueError) as error:
        raise CannotApply(
            f"attention cannot join {type(module).__name__}, because transformers gives it no scaled_dot_product_attention: "
            f"{str(error).splitlines()[0]} Leave out this lever, or describe the module with memfit.levers.attention.describe_attention."
        ) from error


def may_call_sdpa(model: nn.Module) -> list[nn.Module]:
    """The model and all in it but torch's own layers: each must attend in the new way by itself, for a layer may be checkpointed
    and run again while the model's forward is over."""
    return [module for module in model.modules() if not type(module).__module__.startswith("torch.")]


_KNOWN: dict[str, AttentionAdapter] = {
    "monai.networks.blocks.selfattention.SABlock": _monai,
    "monai.networks.blocks.crossattention.CrossAttentionBlock": _monai,
    "diffusers.models.attention_processor.Attention": _diffusers,
    "torch.nn.modules.activation.MultiheadAttention": _torch,
}
