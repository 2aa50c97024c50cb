"""What the last step left beside parameters: a lever may be right in the first step and spoil averages or random numbers later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from memfit.proof.checks import Check, bits, told
from memfit.proof.observing import FittedRun, Outcome
from memfit.proof.reference import Reference
from memfit.proof.rounding import SAME_IN_FLOAT32, size_of
from memfit.proof.shelf import Key, Shelf, distance

Allowed = Callable[[Key, float], float]  # how far a buffer may be off, given how far it is


def at_the_end(reference: Reference, fitted: FittedRun, allowed: Allowed) -> Iterator[Check]:
    """Generators and counters by their bits, averages within what is allowed."""
    plain, run = reference.plain.shelf, fitted.outcome.shelf
    yield from (bits(key, plain, run) for key in plain.keys("end rng"))
    for key in plain.keys("end buffers"):
        check = bits(key, plain, run)
        if not check.holds and key in run and plain.get(key).is_floating_point():
            check = Check(key.kind, told(key), check.error, allowed(key, check.error))
        yield check
    yield from (bits(key, plain, run) for key in run.keys("end buffers") if key not in plain)


def counters_at_the_end(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """Where random numbers differ, only what counts can be compared."""
    plain = reference.plain.shelf
    counters = (key for key in plain.keys("end buffers") if not plain.get(key).is_floating_point())
    yield from (bits(key, plain, fitted.outcome.shelf) for key in counters)


def finely(reference: Reference, times: float) -> Allowed:
    """So many times what a last bit makes of it in as many steps, or the order of long sums where that is too little."""
    plain = reference.plain.shelf

    def allowed(key: Key, error: float) -> float:
        bound = max(_within((reference.moved,), plain, key, times, _eps(plain, key)), SAME_IN_FLOAT32 * size_of(key, plain))
        return bound if error <= bound else max(bound, _within(reference.resummed, plain, key, times, 0.0))

    return allowed


def roughly(reference: Reference, moved: Outcome, times: float, eps: float) -> Allowed:
    """So many times what the eps of a coarser type does."""
    return lambda key, error: _within((moved,), reference.plain.shelf, key, times, eps)


def _within(others: Iterable[Outcome], plain: Shelf, key: Key, times: float, eps: float) -> float:
    here = plain.get(key)
    apart = (distance(here, other.shelf.get(key)) for other in others if key in other.shelf)
    return times * max(4 * eps * distance(here), *apart, 0.0)


def _eps(plain: Shelf, key: Key) -> float:
    return torch.finfo(plain.get(key).dtype).eps
