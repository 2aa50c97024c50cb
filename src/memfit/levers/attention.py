"""attention: maps of queries by keys are never written out; scaled_dot_product_attention or exact chunks of queries instead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memfit.ledger import account
from memfit.ledger.findings.attention import AttentionMap, maps_in
from memfit.ledger.findings.scene import Scene
from memfit.levers.attention_adapters import AttentionAdapter, adapter_of, eager_transformers, may_call_sdpa, sdpa_within, use_sdpa
from memfit.levers.attention_trace import without_maps
from memfit.levers.forwards import exchange_attribute, modules_of
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.reading import are_words, at_least, reader
from memfit.levers.undo import Undo
from memfit.ops.attention import Attend, fused_attention, in_chunks_of, rows_for
from memfit.records import Ledger, Option
from memfit.step import Step

read_settings = reader({"rows": at_least(0), "modules": are_words, "sdpa": are_words})

_DESCRIBED: dict[type[nn.Module], AttentionAdapter] = {}


def describe_attention(module_class: type[nn.Module], adapter: AttentionAdapter) -> None:
    """Say how a module of yours attends: `adapter(module, attend)` gives the forward that takes the place of the module's own.

    `attend(query, key, value, attn_mask, dropout_p)` is called like scaled_dot_product_attention, on [..., tokens, channels].

    >>> class Look(nn.Module):
    ...     def forward(self, x):
    ...         return (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x
    >>> describe_attention(Look, lambda module, attend: lambda x: attend(x, x, x))
    """
    _DESCRIBED[module_class] = adapter


class Attention:
    """Fused where torch has a kernel for it, else a few queries at a time."""

    name, exactness, needs = "attention", "reordered", "MONAI, diffusers, transformers, torch attention, or a description"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """Two, if attention maps of at least 64 by 64 are written out."""
        maps = _maps(ledger)
        if not maps:
            return []
        settings = {
            "modules": sorted({found.op.module for found in maps}),
            "sdpa": sorted({found.op.module for found in maps if "_safe_softmax" in found.op.name}),
        }
        rows = rows_for(max(found.shape[-2] for found in maps))
        fused = "scaled_dot_product_attention; with dropout on a CPU, where that writes maps out as well, exact chunks of queries"
        chunks = f"{rows} queries at a time, probabilities computed again in backward; dropout draws the same numbers"
        return [
            Option(self.name, "fused", "reordered", settings | {"rows": 0}, fused),
            Option(self.name, f"query chunks of {rows}", "reordered", settings | {"rows": rows}, chunks),
        ]

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The step without its maps."""
        return account(without_maps(trace_of(ledger), _maps(ledger), option.settings["rows"]))

    def apply(self, step: Step, option: Option) -> Undo:
        """Every module that has an adapter attends in the new way."""
        with Undo.or_nothing() as undo:
            adapted = _adapted(step, option, undo)
            left = [path for path in option.settings["modules"] if not any(_is_in(path, name) for name in adapted)]
            if left or not adapted:
                which = ", ".join(map(repr, left)) or "any module of this step"
                raise CannotApply(
                    f"attention has no adapter for {which}: its map is written out by code that memfit does not know. Describe the "
                    "module with memfit.levers.attention.describe_attention(YourModule, adapter), or call "
                    "torch.nn.functional.scaled_dot_product_attention in it."
                )
        return undo


def _adapted(step: Step, option: Option, undo: Undo) -> list[str]:
    """The modules that attend in the new way now."""
    rows = option.settings["rows"]
    attend = in_chunks_of(rows) if rows else fused_attention
    calling = _calling_sdpa(step, option, undo)
    return [name for name, module in modules_of(step) if _adapt(module, attend, id(module) in calling, undo)]


def _calling_sdpa(step: Step, option: Option, undo: Undo) -> set[int]:
    """Modules that call scaled_dot_product_attention, transformers' after they were told to, by id."""
    calling = {id(module) for name, module in modules_of(step) if name in option.settings["sdpa"]}
    for _, model in modules_of(step):
        if eager_transformers(model):
            use_sdpa(model, undo)
            calling |= {id(module) for module in may_call_sdpa(model)}
    return calling


def _adapt(module: nn.Module, attend: Attend, calls_sdpa: bool, undo: Undo) -> bool:
    described = next((_DESCRIBED[kind] for kind in type(module).__mro__ if kind in _DESCRIBED), None)
    forward = (described or adapter_of(module))(module, attend)
    if forward is None and calls_sdpa:
        forward = sdpa_within(module, attend)
    if forward is None:
        return False
    exchange_attribute(module, "forward", forward, undo)
    return True


def _maps(ledger: Ledger) -> list[AttentionMap]:
    return list(maps_in(Scene(trace_of(ledger), ledger.at_peak, ledger.peak_op)))


def _is_in(path: str, module: str) -> bool:
    return path == module or not module or path.startswith(f"{module}.")
