"""What every lever's test asks: is the prediction right, is the training the same, and is everything back afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

import memfit
from memfit import Ledger, Step
from memfit.levers import Lever
from memfit.records import Option
from memfit.step.batches import tensors_in

Factory = Callable[[], Step]


def made(make: Factory, seed: int = 0) -> Step:
    torch.manual_seed(seed)
    return make()


def simulated(step: Step) -> Ledger:
    return memfit.profile(step, simulate=True)


def options_of(lever: Lever, make: Factory) -> dict[str, Option]:
    return {option.name: option for option in lever.options(simulated(made(make)))}


def law_errors(lever: Lever, make: Factory) -> dict[str, float]:
    """For each option, how far the rewritten peak is from that of the changed step, as a part of it."""
    before = simulated(made(make))
    errors = {}
    for option in lever.options(before):
        step = made(make)
        with lever.apply(step, option):
            errors[option.name] = lever.rewrite(before, option).peak_bytes / simulated(step).peak_bytes - 1
    return errors


def state_after(step: Step, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses, weights, buffers, optimizer states and the next random numbers after some steps."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor] = {}
    for number in range(steps):
        found |= {f"loss {number} {name}": loss.clone() for name, loss in step.run(step.batch).items()}
    for name, model in step.models.items():
        found |= {f"{name} {key}": value for key, value in model.state_dict().items()}
    for number, optimizer in enumerate(step.optimizers):
        found |= dict(tensors_in(optimizer.state_dict()["state"], f"optimizer {number}"))
    return found | {"random": torch.rand(1)}


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """What is not the same, bit for bit."""
    return [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]


def furniture(step: Step) -> list[Any]:
    """What an undo has to leave as it was: keys, hooks, flags, what levers hang on the step; the loader, and what the allocator is told."""
    modules = [m for model in step.models.values() for m in model.modules()]
    parameters = [p for model in step.models.values() for p in model.parameters()]
    return [
        [list(model.state_dict()) for model in step.models.values()],
        [sorted(m.__dict__) for m in modules],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules],
        [(len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in parameters],
        [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in step.optimizers],
        [[id(p) for g in o.param_groups for p in g["params"]] for o in step.optimizers],
        {name: list(value) if isinstance(value, list) else value for name, value in vars(step.running).items()},
        [id(getattr(step, field.name)) for field in fields(step)],
        sorted((name, value) for name, value in vars(step.loader).items() if isinstance(value, int)) if step.loader else [],
        {name: value for name, value in os.environ.items() if "ALLOC" in name},
    ]
