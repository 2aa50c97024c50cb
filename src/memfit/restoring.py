"""What running a step once more, only to look at it, would leave behind: what modules and optimizers hold, and random numbers."""

from __future__ import annotations

import random
import sys
import sysconfig
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import getclosurevars
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from memfit.kept_bits import bits_restored
from memfit.ops.leaves import leaves_of
from memfit.step import Step
from memfit.torch_private import step_hooks

_LISTS = (list, deque)
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, *_LISTS, set)  # these can be refilled; a library's own kinds may be frozen
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], str(Path(__file__).parent))


@contextmanager
def attributes_restored(step: Step) -> Iterator[None]:
    """Whatever is set, added or removed on a module or optimizer inside is as it was afterwards; so is what their attributes hold.

    Caches, counters, buffers made on the way; not the bits of tensors.
    """
    held = containers_of(step)
    contents = [(each, each.copy()) for each in held if type(each) in _CONTAINERS]
    with bits_restored(memory for each in held for memory in _arrays_in(each)):
        try:
            yield
        finally:
            for each, before in contents:
                _refill(each, before)


def containers_of(step: Step) -> list[Any]:
    """Attributes of modules, of optimizers and of plain objects in them, and the containers in these, each once, the outer ones last."""
    found: dict[int, Any] = {}
    beside = [value for optimizer in step.optimizers for hook in step_hooks(optimizer) or () for value in _used_by(hook)]
    models = [*step.models.values(), *(value for value in beside if isinstance(value, nn.Module))]
    waiting: list[Any] = [each.__dict__ for each in (*(m for model in models for m in model.modules()), *step.optimizers)]
    waiting.append(tuple(beside))
    while waiting:
        held = waiting.pop()
        if id(held) not in found:
            found[id(held)] = held
            waiting.extend(inner for value in _values(held) if (inner := _followed(value)) is not None)
    return list(reversed(found.values()))


def held_tensors(step: Step) -> list[torch.Tensor]:
    """Every tensor in modules' and optimizers' attributes, in containers too; parameters, buffers and states among them."""
    return [value for held in containers_of(step) for value in _values(held) if isinstance(value, torch.Tensor)]


def _used_by(hook: Any) -> list[Any]:
    """What a hook on a step is a method of, or knows by name: the average of weights that it keeps may be nowhere else."""
    if isinstance(hook, partial):
        return [*hook.args, *hook.keywords.values(), *_used_by(hook.func)]
    owner = getattr(hook, "__self__", None)
    known = getclosurevars(hook) if isinstance(hook, (FunctionType, MethodType)) else None
    return [hook, owner, *({**known.globals, **known.nonlocals}.values() if known else ())]


def _values(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _followed(value: Any) -> Any:
    """A container; of an optimizer, or of an object of the user's own, its attributes; None for anything else."""
    if type(value) in _CONTAINERS or type(value) is tuple:
        return value
    return value.__dict__ if isinstance(value, Optimizer) or _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """An object of classes in the user's own files, and nothing in it that goes on by itself: that would not fit what is put back."""
    if not all(map(_is_users_class, type(value).__mro__[:-1])) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return not any(isinstance(held, (Iterator, threading.Thread)) for held in value.__dict__.values())


@cache
def _is_users_class(kind: type) -> bool:
    if kind.__module__ in ("__main__", "abc", "typing"):  # the last two keep nothing in an instance
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.startswith(_LIBRARIES) and "-packages" not in file


def _arrays_in(held: Any) -> Iterator[torch.UntypedStorage]:
    """Memory of NumPy's; arrays of objects, and those that cannot be written to or have gaps, are left out."""
    for array in _values(held):
        while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
            array = array.base
        if type(array) is np.ndarray and array.size and array.flags.writeable and array.flags.forc and not array.dtype.hasobject:
            yield torch.from_numpy(array.ravel(order="K").view(np.uint8)).untyped_storage()


def _refill(held: Any, before: Any) -> None:
    if len(held) == len(before) and all(a is b for a, b in zip(_entries(held), _entries(before), strict=True)):
        return  # somebody else may be reading it
    held.clear()
    if isinstance(held, _LISTS):
        held.extend(before)
    else:
        held.update(before)


def _entries(held: Any) -> Iterator[Any]:
    return chain(held, held.values()) if isinstance(held, dict) else iter(held)


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
