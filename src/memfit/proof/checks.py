"""One comparison: what was compared, how far apart it is, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from memfit.proof.shelf import Key, Shelf, distance, same_bits

_WORDS = {
    "gradients": "the gradient of {}",
    "parameters": "{} after the step",
    "buffers": "buffer {}",
    "optimizer_state": "{}",
    "rng": "the state of {}'s random numbers",
    "later": "the gradient of {}, a step later,",
    "end rng": "the state of {}'s random numbers after the last step",
    "end buffers": "buffer {} after the last step",
    "end": "{} after the last step",
}
# causes before their effects
_TELLING = ("run", "gradients", "buffers", "rng", "optimizer_state", "parameters", "later", "loss", "end rng", "end buffers", "end")
_NOT_THE_SAME_BITS = math.ulp(0.0)  # the error of tensors that are equal as numbers and differ in bits: 0.0 and -0.0


@dataclass(frozen=True, slots=True)
class Check:
    """A distance and its bound."""

    kind: str
    what: str
    error: float
    bound: float
    count: int = 1  # tensors it stands for
    norm: float = 0.0  # of what it should be
    loose: float = 0.0  # the share of a norm that the bound is, where that is much and float64 could not tell

    @property
    def holds(self) -> bool:
        """NaN is never inside a bound."""
        return self.error <= self.bound

    @property
    def badness(self) -> tuple[float, ...]:
        """Sorts the worst last: failures after everything else, causes after effects, then by how near to the bound or beyond it."""
        cause = 0 if self.holds else len(_TELLING) - _TELLING.index(self.kind)
        ratio = self.error / self.bound if self.bound else math.inf if self.error else 0.0
        return (cause, math.inf if math.isnan(ratio) else ratio, math.inf if math.isnan(self.error) else self.error)


@dataclass(frozen=True)
class Yardstick:
    """What rounding may do: the truth, and how far the plain step itself is from it.

    A tensor passes within 3 times the larger of that and 4 eps of the truth's norm.
    """

    plain: Shelf
    truth: Shelf  # in float64; where that cannot be had, the plain step itself
    others: tuple[Shelf, ...]  # the plain step, and the plain step moved by a hair: near a kink (an L1 loss, a ReLU) a hair is much
    eps: float | None = None  # of the numbers it computes with; that of each tensor's own type where nothing is said

    def check(self, key: Key, fitted: Shelf) -> Check:
        """Judge one tensor of the fitted step."""
        plain = self.plain.get(key)
        if not plain.is_floating_point() or key not in fitted or any(key not in shelf for shelf in (self.truth, *self.others)):
            return bits(key, self.plain, fitted)
        truth = self.truth.get(key)
        own, norm = max(distance(other.get(key), truth) for other in self.others), distance(truth)
        bound = 3 * max(own, 4 * (self.eps or _eps(plain)) * norm)
        return Check(key.kind, told(key), distance(fitted.get(key), truth), bound, norm=norm)


def bits(key: Key, plain: Shelf, fitted: Shelf) -> Check:
    """The same bits, or none at all."""
    if key not in plain or key not in fitted:
        there = (plain if key in plain else fitted).get(key)
        return Check(key.kind, f"{told(key)} ({'missing' if key in plain else 'new'})", _size(there), 0.0)
    a, b = plain.get(key), fitted.get(key)
    return Check(key.kind, told(key), 0.0 if same_bits(a, b) else distance(a, b) or _NOT_THE_SAME_BITS, 0.0)


def told(key: Key) -> str:
    """A tensor in words."""
    return _WORDS[key.kind].format(key.name)


def loss_checks(plain: list[dict[str, float]], fitted: list[dict[str, float]], bounds: Iterable[dict[str, float]]) -> Iterator[Check]:
    """Every loss of every step."""
    for number, (a, b, bound) in enumerate(zip(plain, fitted, bounds, strict=True)):
        for name in a:
            what = f"the loss{'' if name == 'loss' else f' of {name}'} of step {number + 1}"
            found = b.get(name, math.inf)  # another model may have other phases
            same = a[name] == found or (math.isnan(a[name]) and math.isnan(found))
            yield Check("loss", what, 0.0 if same else abs(a[name] - found), bound[name])


def worst_of(checks: Iterable[Check]) -> Check:
    """The one that says most: the clearest failure, or else what came nearest to its bound."""
    return max(checks, key=lambda check: check.badness, default=Check("run", "nothing", 0.0, 0.0))


def _size(tensor: torch.Tensor) -> float:
    return distance(tensor) or math.inf


def _eps(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps
