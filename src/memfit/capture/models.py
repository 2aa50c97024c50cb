"""What a ledger needs to know of the networks in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from memfit.capture.whereabouts import ModulePath
from memfit.records import Model, Storage
from memfit.step import Step


def models_of(step: Step, modules: ModulePath) -> tuple[Model, ...]:
    """The step's models and the modules that only its loss holds, with parameters or without: an nn.MSELoss, say."""
    trained = {id(p) for o in step.optimizers for group in o.param_groups for p in group["params"]}
    named = {**step.models, **modules.outsiders}
    return tuple(
        Model(
            name,
            type(model).__name__,
            sum(p.numel() * p.element_size() for p in model.parameters()),
            any(id(p) in trained for p in model.parameters()),
            tuple(_frozen(name, model)),
            name not in step.models,
        )
        for name, model in named.items()
    )


def _frozen(path: str, module: nn.Module) -> Iterator[str]:
    """The outermost modules whose parameters are all frozen."""
    parameters = list(module.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        yield path
        return
    for name, child in module.named_children():
        yield from _frozen(f"{path}.{name}" if path else name, child)


def with_states_from_the_start(storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
    """States that the optimizer made in the recorded step are there from the start of every later one."""
    return tuple(replace(s, born=-1) if s.kind == "optimizer" and s.died is None else s for s in storages)
