"""precision: modules run in bfloat16 or float16 under autocast; a step with a NaN or an infinity is skipped and explained."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.ledger import account
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.precision_running import FiniteGuard, autocast_in_modules
from memfit.levers.precision_trace import is_cast_anywhere, under_autocast
from memfit.levers.reading import are_words, one_of, reader
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option
from memfit.step import Step, device_of

_DTYPES = ("bfloat16", "float16")
read_settings = reader({"dtype": one_of(*_DTYPES)}, {"kept_in_float32": are_words})

_KEPT = (
    "weights, gradients and optimizer states",
    "norms' weights and statistics",
    "losses torch knows (cross entropy, mse, nll, kl and others)",
    "everything a loss computes outside of modules (exp, log, pow, means)",
)
_SPEED = {
    ("cpu", "bfloat16"): "two to four times slower than float32 on a CPU without bfloat16 instructions",
    ("cpu", "float16"): "many times slower than float32 on most CPUs (17 times where we measured)",
}


class Precision:
    """Half of the bits for what convolutions, matrix products and what follows them make."""

    name, exactness, needs = "precision", "rounded", "float32 modules"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """bfloat16 and float16, if any convolution or matrix product runs in float32."""
        if not is_cast_anywhere(trace_of(ledger)):
            return []
        return [self._option(ledger.device, dtype) for dtype in _DTYPES]

    def _option(self, device: str, dtype: str) -> Option:
        scaling = "; losses are scaled so that small gradients survive" if dtype == "float16" else ""
        speed = _SPEED.get((device, dtype), f"speed and memory on {device} are not validated on hardware")
        why = f"modules run under {dtype} autocast{scaling}; {speed}. Kept in float32: {'; '.join(_KEPT)}."
        return Option(self.name, f"{dtype} autocast", "rounded", {"dtype": dtype, "kept_in_float32": list(_KEPT)}, why)

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The step with casts put in and what they make halved."""
        return account(under_autocast(trace_of(ledger), option.settings["dtype"]))

    def apply(self, step: Step, option: Option) -> Undo:
        """Autocast in every module the loss calls, and a guard between gradients and optimizer."""
        dtype, device = getattr(torch, option.settings["dtype"]), device_of(step)
        _refuse(step, device, dtype)
        running = step.running

        def around(phase: str) -> object:
            return autocast_in_modules(device, dtype)

        with Undo.or_nothing() as undo:
            running.around_loss.append(around)  # type: ignore[arg-type]
            undo.then(running.around_loss.remove, around)
            running.guard = FiniteGuard(step, device, dtype)
            undo.then(setattr, running, "guard", None)
        return undo


def _refuse(step: Step, device: str, dtype: torch.dtype) -> None:
    if step.running.guard is not None:
        raise CannotApply("precision is already applied to this step: undo the first one, then apply another.")
    if step.running.steps_in_backward:
        raise CannotApply(
            "precision cannot join an optimizer that steps inside backward: its update is made before a NaN or an infinity "
            "can be seen, so a bad step could not be skipped. Take one of the two."
        )
    half = [n for prefix, net in step.models.items() for n, p in net.named_parameters(prefix) if p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise CannotApply(
            f"precision needs float32 weights, and {half[0]!r} is already in half precision: autocast keeps weights in float32 "
            "so that small updates are not lost. Leave out .half() or .bfloat16() on the model, or leave out this lever."
        )
    if not torch.amp.is_autocast_available(device):
        raise CannotApply(f"precision needs autocast, which torch does not have for {device}: run on cpu, cuda or mps.")
