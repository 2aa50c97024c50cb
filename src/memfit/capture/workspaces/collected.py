"""Collects the calls of a simulated step whose workspace has to be known, and gives each op its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.workspaces.apart import measure_apart
from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.extending import LIMITS, Extended, extended, trials_of
from memfit.capture.workspaces.measured import Taken, measure
from memfit.capture.workspaces.remembered import Remembered

_NOTHING_INSIDE = frozenset(
    """
    empty zeros ones full arange scalar_tensor new_empty new_zeros new_full new_ones new_empty_strided empty_strided empty_like zeros_like
    ones_like full_like clone copy_ _to_copy zero_ fill_ detach lift_fresh lift_fresh_copy bernoulli_ normal_ uniform_ rand randn rand_like
    randn_like cat stack embedding constant_pad_nd _local_scalar_dense item _foreach_zero_ slice_backward select_backward _unsafe_view
    """.split()  # noqa: SIM905
)


_SAFE_HERE = frozenset(
    """
    convolution convolution_backward mm addmm bmm baddbmm native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward native_batch_norm native_batch_norm_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data mse_loss mse_loss_backward nll_loss_forward nll_loss_backward mean sum
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    """.split()  # noqa: SIM905
)
"""Calls that do no harm on zeros, as they were asked for; any other, and any made-up one, is tried in a process of its own."""


_LOWERED = frozenset({"convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm"})


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _is_safe_here(func: Any) -> bool:
    return _name(func) in _SAFE_HERE or torch.Tag.pointwise in func.tags


def _kind_of(func: Any) -> str:
    if func.is_view or func.namespace != "aten" or _name(func) in _NOTHING_INSIDE:
        return "nothing"
    return "pointwise" if torch.Tag.pointwise in func.tags else "inside"


@dataclass(frozen=True)
class OpBytes:
    """For each op of a step, in order."""

    inside: list[int]  # beyond its outputs, at its own peak
    unsure: list[int]  # by how much that may be off; 0 where it was measured as it is
    hidden: list[int]  # held by its outputs although they do not show it
    in_half: dict[int, dict[str, int]]  # by op and type: what it would take inside in half precision


class Workspaces:
    """`note` each op as it is recorded; `of_ops` then measures what is not known yet."""

    def __init__(self, half: Sequence[str] = ()) -> None:
        self._kinds: dict[Any, str] = {}
        self._calls: dict[str, Call] = {}
        self._key_of_op: dict[int, str] = {}
        self._half = half
        self._half_keys_of_op: dict[int, dict[str, str]] = {}  # by the name of the type

    def note(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the call if it may take memory inside."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind == "nothing" or (kind == "pointwise" and _of_one_dtype(args)):
            return
        call = Call.of(func, args, kwargs)
        key = call.key
        self._calls.setdefault(key, call)
        self._key_of_op[number] = key
        if self._half and _name(func) in _LOWERED and all(shape.dtype is torch.float32 for shape in call.shapes()):
            for dtype in self._half:
                lowered = call.with_shapes(lambda shape, dtype=dtype: replace(shape, dtype=getattr(torch, dtype)))  # type: ignore[misc]
                self._calls.setdefault(lowered.key, lowered)
                self._half_keys_of_op.setdefault(number, {})[dtype] = lowered.key

    def of_ops(self, made: Sequence[int], progress: Callable[[str], None]) -> OpBytes:
        """The bytes of each op; `made` tells for each how many bytes of new storages it was seen to make."""
        remembered = Remembered()
        unknown = {key: call for key, call in self._calls.items() if remembered.get(key) is None}
        if unknown:
            progress(f"measuring the workspaces of {len(unknown)} kinds of ops, once for this machine")
            outputs = {key: made[number] for number, key in self._key_of_op.items()}
            outputs |= {key: made[number] // 2 for number, keys in self._half_keys_of_op.items() for key in keys.values()}
            remembered.put(_measure_all(unknown, outputs))
        found = OpBytes([0] * len(made), [0] * len(made), [0] * len(made), {})
        for number, keys in self._half_keys_of_op.items():
            found.in_half[number] = {dtype: int(taken[0]) for dtype, key in keys.items() if (taken := remembered.get(key)) is not None}
        for number, key in self._key_of_op.items():
            inside, unsure, kept = remembered.get(key) or [0.0, 0.0, 0.0]
            found.inside[number], found.unsure[number] = int(inside), int(unsure)
            if kept > 1.02 * made[number]:  # an extended line is not exact to the byte
                found.hidden[number] = int(kept) - made[number]
        return found


def _of_one_dtype(args: tuple[Any, ...]) -> bool:
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dim()}
    return len(dtypes) < 2  # else the CPU converts inputs inside the op


def _measure_all(calls: dict[str, Call], outputs: dict[str, int]) -> dict[str, list[float]]:
    """[bytes inside, their uncertainty, bytes kept] by signature; where smaller calls do not settle it, larger ones are run."""
    left, found = calls, dict[str, Extended]()
    for limit in LIMITS:
        trials = {key: trials_of(call, outputs[key], limit) for key, call in left.items()}
        measured = _measured({call.key: call for tried in trials.values() for call in tried}, calls)
        for key, tried in trials.items():
            points = [(call, taken) for call in tried if (taken := measured[call.key]) is not None]
            found[key] = extended(calls[key], points, outputs[key], found[key].points if key in found else ())
        left = {key: call for key, call in left.items() if found[key].may_bend}
        if not left:
            break
    return {key: found[key].figures() for key in calls}


def _measured(trials: dict[str, Call], asked: dict[str, Call]) -> dict[str, Taken | None]:
    here = {key: call for key, call in trials.items() if key in asked and _is_safe_here(call.func)}
    elsewhere = {key: call for key, call in trials.items() if key not in here}
    measured = dict(zip(here, measure(list(here.values())), strict=True)) if here else {}
    return measured | dict(zip(elsewhere, measure_apart(list(elsewhere.values())), strict=True))
