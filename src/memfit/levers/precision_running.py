"""Half precision while a step runs: autocast inside modules, and a guard that keeps a bad step from being taken."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from memfit.levers.precision_buffers import BuffersBefore
from memfit.restoring import RandomState, attributes_restored, random_numbers_restored
from memfit.step import Step, parameters_of
from memfit.step.batches import map_tensors
from memfit.step.non_finite import first_non_finite, is_finite


@contextmanager
def autocast_in_modules(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Modules run under autocast and hand out float32, so that what a loss computes by itself keeps all its bits.

    >>> net = nn.Linear(2, 2)
    >>> with autocast_in_modules("cpu", torch.bfloat16):
    ...     net(torch.ones(1, 2)).dtype, (torch.ones(1, 2) @ torch.ones(2, 1)).dtype
    (torch.float32, torch.float32)
    """
    open_casts: list[torch.autocast | None] = []

    def enter(module: nn.Module, args: Any) -> None:
        open_casts.append(None if open_casts else torch.autocast(device, dtype))
        if cast := open_casts[-1]:
            cast.__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        cast = open_casts.pop() if open_casts else None
        if cast is None:
            return None
        cast.__exit__(None, None, None)
        return _in_float32(output, dtype)

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for cast in filter(None, open_casts):  # a forward that failed before its hook
            cast.__exit__(None, None, None)


def _in_float32(output: Any, dtype: torch.dtype) -> Any:
    """A module's output without tensors of `dtype`, also where they are fields of a dataclass."""

    def record(value: Any) -> Any:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        held = {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
        changed = {name: new for name, old in held.items() if (new := _in_float32(old, dtype)) is not old}
        twin = copy.copy(value) if changed else value  # not made anew, which a __post_init__ would notice
        for name, new in changed.items():
            object.__setattr__(twin, name, new)
        return twin

    return map_tensors(lambda t: t.float() if t.dtype == dtype else t, output, record)


@dataclass
class _Run:
    """What a phase's forward passes started from."""

    buffers: BuffersBefore
    forwards: list[tuple[Any, dict[str, Any], RandomState]] = field(default_factory=list)  # batch, carry, what it drew from
    losses: list[torch.Tensor] = field(default_factory=list)


class FiniteGuard:
    """Skips a step whose loss or gradients are not finite, puts buffers back and names where it began; scales losses for float16."""

    def __init__(self, step: Step, device: str, dtype: torch.dtype) -> None:
        self._step, self._device, self._dtype = step, device, dtype
        self._scalers: dict[tuple[str, type], torch.amp.GradScaler] = {}  # a simulation's losses never meet the real scaler
        self._runs: dict[str, _Run] = {}
        self._phase = ""
        self.skipped = 0  # steps not taken so far

    def begins(self, phase: str, number: int, batch: Any, carry: dict[str, Any]) -> None:
        """A part of a batch is about to be run: remember what its forward starts from."""
        self._phase = phase
        if number == 0:
            self._runs[phase] = _Run(BuffersBefore(self._step))
        self._runs[phase].forwards.append((batch, dict(carry), RandomState.now()))

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, times the phase's scale for float16."""
        self._runs[self._phase].losses.append(loss.detach())
        if self._dtype is not torch.float16:
            return loss
        kind = (self._phase, type(loss.detach()))
        if kind not in self._scalers:
            self._scalers[kind] = torch.amp.GradScaler(self._device)
        scaled: torch.Tensor = self._scalers[kind].scale(loss)
        return scaled

    def lets_step(self, phase: str, optimizers: Sequence[Optimizer]) -> bool:
        """Bring gradients back to scale; False, with a warning, if one of them or the loss is not finite."""
        run = self._runs.pop(phase)
        scaler = self._scalers.get((phase, type(run.losses[0])))
        if scaler:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        good = _all_finite(optimizers, run.losses)
        if scaler and _gradients(optimizers):
            scaler.update()
        if good:
            return True
        self.skipped += 1
        self._put_back(run)
        warnings.warn(self._told(phase, run, optimizers, scaler), stacklevel=4)
        return False

    def state_dict(self) -> dict[str, Any]:
        """The scale of each phase's losses, and how many steps were skipped."""
        scales = {phase: scaler.state_dict() for (phase, kind), scaler in self._scalers.items() if kind is torch.Tensor}
        return {"skipped": self.skipped, "scales": scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at these scales."""
        self.skipped = state["skipped"]
        for phase, scale in state["scales"].items():
            scaler = self._scalers[phase, torch.Tensor] = torch.amp.GradScaler(self._device)
            scaler.load_state_dict(scale)

    def _put_back(self, run: _Run) -> None:
        run.buffers.put_back()

    def _told(self, phase: str, run: _Run, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None) -> str:
        found = self._found(phase, run, optimizers)
        scale = f" The loss scale is now {scaler.get_scale():g}." if scaler else ""
        kind, of_phase = str(self._dtype).removeprefix("torch."), f" in phase {phase!r}" if phase else ""
        return (
            f"A NaN or an infinity under {kind} autocast{of_phase}: {found}. This step is skipped; weights, optimizer and buffers "
            f"are as before it ({self.skipped} skipped so far; schedulers go on).{scale}"
        )

    def _found(self, phase: str, run: _Run, optimizers: Sequence[Optimizer]) -> str:
        if not is_finite([(batch, carry) for batch, carry, _ in run.forwards]):
            return "it is already in the batch, or in what the phase before left in carry"
        where = self._first_module(phase, run)
        return f"it first appears in the output of {where}" if where else self._in_backward(optimizers)

    def _first_module(self, phase: str, run: _Run) -> str | None:
        """The forward passes once more, with the same random numbers, and nothing of them left behind."""
        loss = next(p.loss for p in self._step.all_phases if p.name == phase)
        names = {id(m): name for prefix, net in self._step.models.items() for name, m in net.named_modules(prefix=prefix)}

        def run_again() -> None:
            for batch, carry, random_state in run.forwards:
                random_state.set_again()
                with autocast_in_modules(self._device, self._dtype):
                    loss(self._step.model, batch, dict(carry))

        try:
            with random_numbers_restored(), attributes_restored(self._step):
                return first_non_finite(run_again, lambda module: names.get(id(module), type(module).__name__))
        finally:
            self._put_back(run)

    def _in_backward(self, optimizers: Sequence[Optimizer]) -> str:
        """Backward goes from the last module to the first, so it began at the last parameter it reached."""
        trained = {id(p) for p in parameters_of(optimizers)}
        named = [(n, p) for prefix, net in self._step.models.items() for n, p in net.named_parameters(prefix) if id(p) in trained]
        bad = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        if not bad:
            return "no module's output shows it, so it comes from the loss function itself"
        return f"every module's output is finite, so it appeared in backward; the gradient of {bad[-1]} is the first that shows it"


def _gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    return [p.grad for p in parameters_of(optimizers) if p.grad is not None]


def _all_finite(optimizers: Sequence[Optimizer], losses: Sequence[torch.Tensor]) -> bool:
    """Whether losses and gradients are finite: the largest of them is, and it takes no memory to find."""
    return math.isfinite(float(torch.nn.utils.get_total_norm([*_gradients(optimizers), *losses], norm_type=math.inf)))
