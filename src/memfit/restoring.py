"""What running a step once more, only to look at it, would leave behind: what modules hold in their attributes, and random numbers."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfit.ops.leaves import leaves_of
from memfit.step import Step

_CONTAINERS = (dict, OrderedDict, list, set)  # these can be refilled; a library's own kinds may be frozen


@contextmanager
def attributes_restored(step: Step) -> Iterator[None]:
    """Whatever is set, added or removed on a module inside is as it was afterwards; so are the lists, dicts and sets in its attributes.

    Caches, counters, buffers made on the way.
    """
    contents = [(held, _copy(held)) for held in containers_of(step) if type(held) in _CONTAINERS]
    try:
        yield
    finally:
        for held, copy in contents:
            _refill(held, copy)


def containers_of(step: Step) -> list[Any]:
    """Modules' attributes, and the dicts, lists, sets and tuples in them, each once, the outer ones last."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.__dict__ for model in step.models.values() for module in model.modules()]
    while waiting:
        held = waiting.pop()
        if id(held) not in found and (type(held) in _CONTAINERS or type(held) is tuple):
            found[id(held)] = held
            waiting.extend(held.values() if isinstance(held, dict) else held)
    return list(reversed(found.values()))


def held_tensors(step: Step) -> list[torch.Tensor]:
    """Every tensor in modules' attributes, in containers too; parameters and buffers among them."""
    values = (value for held in containers_of(step) for value in (held.values() if isinstance(held, dict) else held))
    return [value for value in values if isinstance(value, torch.Tensor)]


def _copy(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else held.copy()


def _refill(held: Any, copy: Any) -> None:
    held.clear()
    if isinstance(held, list):
        held.extend(copy)
    else:
        held.update(copy)


@contextmanager
def outer_gradients_restored(step: Step) -> Iterator[None]:
    """What losses reach beside the models' parameters, as tensors they hold themselves or the batch, has the gradients it had.

    A leaf may be made by the loss, and go with it: it is not held.
    """
    own = {id(p) for model in step.models.values() for p in model.parameters()}
    before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}

    def look(loss: torch.Tensor) -> None:
        for leaf in leaves_of(loss):
            if id(leaf) not in own and (id(leaf) not in before or before[id(leaf)][0]() is not leaf):
                before[id(leaf)] = weakref.ref(leaf), leaf.grad
                leaf.grad = None

    step.running.saw_loss.append(look)
    try:
        yield
    finally:
        step.running.saw_loss.remove(look)
        for found, gradient in before.values():
            if (leaf := found()) is not None:
                leaf.grad = gradient


@dataclass(frozen=True)
class RandomState:
    """Where torch, Python and NumPy stand in drawing random numbers.

    >>> state = RandomState.now()
    >>> first = random.random()
    >>> state.set_again()
    >>> random.random() == first
    True
    """

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def set_again(self) -> None:
        """The next random numbers are those that came after it."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the next random numbers are those that would have come."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.set_again()
