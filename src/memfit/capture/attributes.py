"""Everything a model's modules hold in their attributes, put back after a capture: caches, counters, buffers made on the way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.step import Step

_CONTAINERS = (dict, OrderedDict, list, set)  # these can be refilled; a library's own kinds may be frozen


@contextmanager
def attributes_restored(step: Step) -> Iterator[None]:
    """Whatever is set, added or removed on a module inside is as it was afterwards; so are the lists, dicts and sets it held."""
    modules = [module for model in step.models.values() for module in model.modules()]
    before = [(module.__dict__, dict(module.__dict__)) for module in modules]
    contents = [(held, _copy(held)) for _, attributes in before for held in attributes.values() if type(held) in _CONTAINERS]
    try:
        yield
    finally:
        for held, copy in contents:
            _refill(held, copy)
        for attributes, copy in before:
            _refill(attributes, copy)


def _copy(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else held.copy()


def _refill(held: Any, copy: Any) -> None:
    held.clear()
    if isinstance(held, list):
        held.extend(copy)
    else:
        held.update(copy)
