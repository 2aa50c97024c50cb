"""An optimizer's states in eight bits, through bitsandbytes where it is installed."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.errors import MemfitError
from memfit.levers.lever import CannotApply
from memfit.levers.optimizer_line import updates_in, without_temporaries
from memfit.levers.undo import Undo
from memfit.records import Storage, Trace

KINDS = ("Adam", "AdamW")
_SMALLEST = 4096  # numbers: bitsandbytes keeps smaller states as they are
_BLOCK = 256  # numbers that share a scale
_INSIDE_ON_CPU = 5  # copies of the gradient that its update takes inside: measured; its CUDA kernel takes none
_UNKNOWN_TO_IT = ("amsgrad", "maximize", "capturable", "differentiable")


def is_installed() -> bool:
    """Whether bitsandbytes can be imported."""
    return importlib.util.find_spec("bitsandbytes") is not None


def in_eight_bits(trace: Trace) -> Trace:
    """States of a byte a number and a scale a block; the update is one kernel."""
    for update in updates_in(trace):
        largest = max(trace.storages[g].bytes for g in update.gradients)
        trace = without_temporaries(trace, update, _INSIDE_ON_CPU * largest if trace.device == "cpu" else 0)
    return replace(trace, storages=tuple(_shrunk(s) for s in trace.storages))


def _shrunk(storage: Storage) -> Storage:
    numbers = math.prod(storage.shape)
    if storage.kind != "optimizer" or storage.dtype != "float32" or numbers < _SMALLEST:
        return storage
    return replace(storage, bytes=numbers + 4 * -(-numbers // _BLOCK), dtype="uint8")


def keep_eight_bits(optimizer: Optimizer, undo: Undo) -> None:
    """The optimizer stays, with its groups and the schedulers that hold it; its step becomes that of bitsandbytes."""
    _refuse(optimizer)
    import bitsandbytes

    eight = getattr(bitsandbytes.optim, f"{type(optimizer).__name__}8bit")([dict(g) for g in optimizer.param_groups])
    for group in optimizer.param_groups:
        for name in eight.defaults.keys() - group.keys():
            undo.then(group.pop, name, None)
            group[name] = eight.defaults[name]

    def step(closure: Any = None) -> Any:
        eight.param_groups, eight.state = optimizer.param_groups, optimizer.state
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        return eight.step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or they warn that somebody exchanged it
    before = optimizer.__dict__.get("step")
    undo.then(_in_full, optimizer)
    undo.then(optimizer.__dict__.pop, "step", None) if before is None else undo.then(setattr, optimizer, "step", before)
    optimizer.step = step  # type: ignore[method-assign]
    undo.then(optimizer.register_load_state_dict_pre_hook(refuse_to_load).remove)


def refuse_to_load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Without a word torch would make floats of the bytes in it, which are numbers of steps on a scale."""
    raise MemfitError(
        f"{type(optimizer).__name__} keeps its states in eight bits here, and torch cannot load them: take the lever off first. A training "
        "that is to be resumed is saved after that as well, with its states in full, and goes on without this lever."
    )


def _refuse(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    used = [name for name in _UNKNOWN_TO_IT for group in optimizer.param_groups if group.get(name)]
    if not is_installed():
        why = "bitsandbytes is not installed: pip install bitsandbytes, or leave this option out"
    elif kind not in KINDS or not type(optimizer).__module__.startswith("torch.optim."):
        why = f"bitsandbytes has a form for torch's {' and '.join(KINDS)}: use one of these, or leave this option out"
    elif used:
        why = f"bitsandbytes knows no {used[0]}: switch it off, or leave this option out"
    elif optimizer.state:
        why = "it has states in full already: ask for it before the first step"
    else:
        return
    raise CannotApply(f"{kind} cannot keep its states in eight bits; {why}.")


def _in_full(optimizer: Optimizer) -> None:
    """The states as torch's own step needs them; what eight bits lost stays lost."""
    from bitsandbytes.functional import dequantize_blockwise

    for parameter, state in list(optimizer.state.items()):
        full = {
            name: dequantize_blockwise(state[f"state{n}"], absmax=state[f"absmax{n}"], code=state[f"qmap{n}"])
            if state[f"state{n}"].dtype == torch.uint8
            else state[f"state{n}"]
            for n, name in ((1, "exp_avg"), (2, "exp_avg_sq"))
        }
        optimizer.state[parameter] = {"step": torch.tensor(float(state["step"])), **full}
