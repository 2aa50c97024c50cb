"""Whether a tensor of a reordered step is off by rounding alone: against float64, other orders of long sums, and float64 of both."""

from __future__ import annotations

from dataclasses import replace

from memfit.proof.checks import Check, Yardstick
from memfit.proof.observing import FittedRun
from memfit.proof.reference import Reference
from memfit.proof.shelf import Key, Shelf, distance

_SAME_IN_FLOAT64, SAME_IN_FLOAT32 = 1e-9, 3e-5  # of a norm; what loses bits (bfloat16) is off by 1e-4 and more
_COARSE = 1e-4  # of a norm: a bound beyond it (bfloat16 weights, autocast in the loss) lets wrong weights of a part through
_SMALL_BESIDE = 1e-2  # a gradient that is nothing but rounding is held to a share of all of them


def yardstick(reference: Reference) -> Yardstick:
    """Float64 where it can be had, or else a plain run moved by a hair."""
    plain = reference.plain.shelf
    if reference.exact.failure:
        return Yardstick(plain, plain, (reference.moved.shelf,))
    return Yardstick(plain, reference.exact.shelf, (plain, reference.moved.shelf))


def judged(key: Key, yard: Yardstick, reference: Reference, fitted: FittedRun) -> Check:
    """Terms that nearly cancel (a bias under an L1 loss) are off by what their order makes of them, and one order alone may be lucky.

    So what is out of bounds is held to other orders of the plain step's sums, too.
    """
    check = yard.check(key, fitted.outcome.shelf)
    judged = _or_in_float64(check, key, reference, fitted)
    if judged.holds or check.holds or check.bound == 0.0:
        return judged
    wider = replace(yard, others=(*yard.others, *(other.shelf for other in reference.resummed))).check(key, fitted.outcome.shelf)
    return _or_in_float64(wider, key, reference, fitted) if wider.holds else judged


def _or_in_float64(check: Check, key: Key, reference: Reference, fitted: FittedRun) -> Check:
    """What rounding alone has moved is gone in float64. Asked where the bound is coarse, and of what is a little beyond it.

    (Long sums in another kernel, or signs at a kink, move more than a last bit.)
    """
    if check.bound == 0.0:
        return check
    near = check if check.holds else _near(key, check, reference.plain.shelf, fitted.outcome.shelf, SAME_IN_FLOAT32)
    loose = _looseness(key, check, reference.plain.shelf) if check.holds else 0.0
    if not near.holds or (check.holds and not loose):
        return check
    if reference.exact.failure or fitted.exact().failure:
        return replace(near, loose=loose)
    nearer = _near(key, check, reference.exact.shelf, fitted.exact().shelf, _SAME_IN_FLOAT64)
    if nearer.holds:
        return near
    return replace(nearer, what=f"{check.what} in float64") if check.holds else check


def _looseness(key: Key, check: Check, plain: Shelf) -> float:
    """The share of a norm that a bound is, where it is coarse, and else 0; what is nothing but rounding is measured by all others."""
    if check.bound <= _COARSE * check.norm:
        return 0.0
    size = size_of(key, plain)
    return check.bound / size if check.bound > _COARSE * size > 0 else 0.0


def size_of(key: Key, shelf: Shelf) -> float:
    """The tensor's norm, and a hundredth of all norms."""
    return distance(shelf.get(key)) + _SMALL_BESIDE * shelf.norm(key.kind)


def _near(key: Key, check: Check, truth: Shelf, found: Shelf, share: float) -> Check:
    """Within a share of the tensor's norm and of a hundredth of all norms."""
    if key not in truth or key not in found:
        return check
    return Check(check.kind, check.what, distance(truth.get(key), found.get(key)), share * size_of(key, truth))
