"""Exchanging the forward of single modules, and putting the old ones back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from memfit.levers.undo import Undo
from memfit.step import Step

Forward = Callable[..., Any]
Adapter = Callable[[nn.Module], Forward]


def modules_of(step: Step) -> Iterator[tuple[str, nn.Module]]:
    """Every module of every model, each once, with its path."""
    seen: set[int] = set()
    for prefix, model in step.models.items():
        for name, module in model.named_modules(prefix=prefix):
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module


def adapter_for(module: nn.Module, adapters: Mapping[type[nn.Module], Adapter]) -> Adapter | None:
    """The adapter of the module's class, or of the nearest class it is derived from."""
    return next((adapters[kind] for kind in type(module).__mro__ if kind in adapters), None)


def exchange_attribute(target: Any, name: str, value: Any, undo: Undo) -> None:
    """Set an attribute on one object; undone, the object has again what it had, or nothing of its own."""
    had, before = name in vars(target), vars(target).get(name)
    object.__setattr__(target, name, value)
    undo.then(object.__setattr__, target, name, before) if had else undo.then(object.__delattr__, target, name)
