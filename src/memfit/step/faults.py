"""What can be wrong with a Step, all of it found at once and said in plain words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.step.batches import tensors_in

if TYPE_CHECKING:
    from memfit.step import Step


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


def faults_of(step: Step) -> list[str]:
    """Every fault that can be seen before the step runs."""
    faults = list(_missing_parts(step))
    return faults or [*_optimizer_faults(step), *_batch_faults(step), *_loss_call_faults(step), *_between_faults(step)]


def _missing_parts(step: Step) -> Iterator[str]:
    model = step.model
    members = list(model.values()) if isinstance(model, Mapping) else [model] if isinstance(model, nn.Module) else model
    if not isinstance(members, (list, tuple)) or not members or not all(isinstance(m, nn.Module) for m in members):
        yield f"model is {_kind(model)}: give a torch.nn.Module, or a dict or list of them"
    if step.phases and (step.loss is not None or step.optimizer is not None):
        yield "both phases and a loss or optimizer of the step itself were given: put each loss and optimizer into its Phase"
    elif step.phases:
        yield from _phase_faults(step)
    else:
        if not callable(step.loss):
            yield f"loss is {_kind(step.loss)}: give a function loss(model, batch) that returns a scalar tensor"
        yield from _not_optimizers("optimizer", step.optimizer)
    yield from _variant_faults(step)
    if step.batch is None:
        yield "no batch was given: hand over one sample batch, as your DataLoader gives it"


def _variant_faults(step: Step) -> Iterator[str]:
    if not isinstance(step.variants, Mapping):
        yield f"variants is {_kind(step.variants)}: give a dict of names and functions that build a Step"
        return
    for name, build in step.variants.items():
        if not callable(build):
            yield f"the variant {name!r} is {_kind(build)}: give a function without arguments that builds a Step"


def _phase_faults(step: Step) -> Iterator[str]:
    names = [phase.name for phase in step.phases]
    if len(set(names)) < len(names):
        yield f"two phases share a name ({', '.join(names)}): give each its own"
    for phase in step.phases:
        if not callable(phase.loss):
            yield f"the loss of phase {phase.name!r} is {_kind(phase.loss)}: give a function loss(models, batch, carry)"
        yield from _not_optimizers(f"the optimizer of phase {phase.name!r}", phase.optimizer)
    if step.clip_grad_norm is not None or step.scheduler is not None:
        yield "clip_grad_norm and scheduler belong to each Phase when phases are given"


def _not_optimizers(what: str, optimizer: object) -> Iterator[str]:
    members = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not members or not all(isinstance(member, Optimizer) for member in members):
        yield f"{what} is {_kind(optimizer)}: give a torch.optim.Optimizer (or a list of them)"


def _optimizer_faults(step: Step) -> Iterator[str]:
    ours = {id(p) for model in step.models.values() for p in model.parameters()}
    for optimizer in step.optimizers:
        if inspect.signature(type(optimizer).step).parameters.get("closure", _OPTIONAL).default is inspect.Parameter.empty:
            yield (
                f"{type(optimizer).__name__} evaluates the loss several times a step (it needs a closure), which memfit does not do: "
                "use an optimizer that takes one gradient a step"
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = [p for p in held if id(p) not in ours]
        if len(strangers) == len(held):
            yield (
                f"{type(optimizer).__name__} holds none of the model's parameters, so it would train nothing: "
                "make the optimizer from this model's parameters(), after the model is in its final form"
            )
        elif strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            yield (
                f"{type(optimizer).__name__} holds {len(strangers)} tensors that are not in the model (shapes {shapes}"
                f"{', …' if len(strangers) > 3 else ''}): give the model they belong to as well, as in Step({{'a': …, 'b': …}}, …)"
            )


def _batch_faults(step: Step) -> Iterator[str]:
    found = list(tensors_in(step.batch))
    if not found:
        yield f"the batch is {_kind(step.batch)} without a tensor in it: give tensors, or nested dicts, lists and tuples of them"
        return
    if not step.batch_size:
        yield "the batch is empty: give it at least one sample"
    if sparse := [path for path, t in found if t.layout != torch.strided]:
        yield f"the batch holds sparse tensors ({', '.join(sparse)}), whose memory memfit does not follow: give dense ones"
    devices = {str(p.device) for model in step.models.values() for p in model.parameters()}
    if len(devices) == 1 and (elsewhere := {str(t.device) for _, t in found} - devices):
        yield (
            f"the model is on {devices.pop()} and the batch on {', '.join(sorted(elsewhere))}: "
            "move one of them, as in batch.to(device) or model.to(device)"
        )


def _loss_call_faults(step: Step) -> Iterator[str]:
    wanted = ("models", "batch", "carry") if step.phases else ("model", "batch")
    losses: list[Any] = [phase.loss for phase in step.phases] or [step.loss]
    for loss in losses:
        try:
            inspect.signature(loss).bind(*wanted)
        except TypeError as error:
            yield f"the loss cannot be called as loss({', '.join(wanted)}): {error}"
        except ValueError:  # a builtin without a signature: the first run will tell
            continue


def _between_faults(step: Step) -> Iterator[str]:
    """What comes between gradients and the next step: it would be missed in the middle of the first one, with weights moved."""
    for phase in step.all_phases:
        of = f" of phase {phase.name!r}" if phase.name else ""
        clip = phase.clip_grad_norm
        number = isinstance(clip, Real) and not isinstance(clip, bool)
        if clip is not None and not (number and clip > 0):
            told = str(clip) if number else _kind(clip)
            yield f"clip_grad_norm{of} is {told}: give the largest norm that gradients may have, a number above 0"
        yield from dict.fromkeys(f"the scheduler{of} {why}" for scheduler in phase.schedulers if (why := _why_not_stepped(scheduler)))
    if step.weight is not None and not callable(step.weight):
        yield f"weight is {_kind(step.weight)}: give a function weight(batch) that says what a part of the batch counts for"


def _why_not_stepped(scheduler: object) -> str:
    move: Callable[[], object] | None = getattr(scheduler, "step", None)
    if not callable(move):
        return f"is {_kind(scheduler)}, which has no step(): give one of torch.optim.lr_scheduler (or a list of them)"
    try:
        inspect.signature(move).bind()
    except TypeError as error:
        return (
            f"({type(scheduler).__name__}) wants to be told something at each step ({error}), and memfit calls step() alone: leave it out "
            "of the Step and call it in your own loop, as in plateau.step(loss)"
        )
    except ValueError:  # a builtin without a signature: the first run will tell
        pass
    return ""


def value_faults(step: Step) -> list[str]:
    """A model or a batch on "meta" has shapes only: a simulation can be for another device, a run cannot."""
    tensors = [t for model in step.models.values() for t in (*model.parameters(), *model.buffers())] + [
        t for _, t in tensors_in(step.batch)
    ]
    if not any(t.device.type == "meta" for t in tensors):
        return []
    return [
        "its tensors are on meta and hold no values: build it on cpu; --simulate, memfit plan and memfit check take no memory for it "
        "(and with --device cpu they take it as it is)"
    ]


def loss_faults(phase: str, loss: object) -> list[str]:
    """What is wrong with the value a loss gave, as far as its type and shape tell."""
    which = f"the loss of phase {phase!r}" if phase else "the loss"
    if not isinstance(loss, torch.Tensor):
        return [f"{which} returned {_kind(loss)}: return a scalar tensor, the mean over the batch"]
    faults = []
    if loss.numel() != 1:
        faults.append(f"{which} has shape {tuple(loss.shape)}, not a scalar: reduce it, as in loss.mean()")
    if not loss.requires_grad:
        faults.append(
            f"{which} does not depend on any trainable parameter: look for detach(), no_grad(), .data or parameters that are all frozen"
        )
    return faults


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
