"""Whether a dataset's samples depend on random numbers, as augmented ones do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (np.random.RandomState, np.random.Generator, torch.Generator, random.Random)
_DEEPEST = 8  # a dataset of transforms of transforms


def draws_random_numbers(dataset: Any) -> bool:
    """Whether fetching a sample draws random numbers; yes, too, where that cannot be found out. The user's next numbers stay the same.

    >>> from torch.utils.data import TensorDataset
    >>> draws_random_numbers(TensorDataset(torch.zeros(3)))
    False
    """
    if not hasattr(dataset, "__getitem__") or _holds_a_generator(dataset, set(), _DEEPEST):
        return True
    with _states_put_back() as states:
        before = states()
        try:
            copy.copy(dataset)[0]  # a cache it opens stays out of this process
        except Exception:
            return True
        return states() != before


@contextmanager
def _states_put_back() -> Iterator[Callable[[], tuple[bytes, object, str]]]:
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield lambda: (torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state(legacy=False)["state"]))
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _holds_a_generator(value: Any, seen: set[int], depth: int) -> bool:
    """A generator of its own, somewhere inside: fetching a sample to see would move it on."""
    if isinstance(value, GENERATORS):
        return True
    if depth == 0 or id(value) in seen or isinstance(value, (torch.Tensor, np.ndarray, str, bytes, int, float, type)):
        return False
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        inner = list(value[:64])  # transforms, not samples
    elif isinstance(value, Mapping):
        inner = list(value.values())[:64]
    else:
        inner = [*getattr(value, "__dict__", {}).values(), getattr(value, "R", None)]  # MONAI's transforms share theirs in the class
    return any(_holds_a_generator(part, seen, depth - 1) for part in inner)
