"""How each class of exactness is judged. Each rule takes the reference and a fitted run, and gives its checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from memfit.proof.checks import Check, Yardstick, bits, loss_checks, told
from memfit.proof.end import at_the_end, counters_at_the_end, finely, roughly
from memfit.proof.observing import FittedRun, Outcome
from memfit.proof.reference import Reference
from memfit.proof.rounding import SAME_IN_FLOAT32, judged, yardstick
from memfit.proof.shelf import Key, Shelf, distance, same_bits

_STATE = ("parameters", "optimizer_state")
_TRAJECTORY = 10  # times the noise that later steps may be off: what rounding did in the first has grown in an optimizer's hands

Rule = Callable[[Reference, FittedRun], Iterator[Check]]


def bitwise(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """Equal bits of everything. A step whose own bits do not repeat is held to 3 times the distance of two plain runs."""
    found = list(_equal_bits(reference, fitted))
    yield from found if all(check.holds for check in found) or reference.repeats else _within_repeats(reference, fitted)


def reordered(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """Rounding differs and nothing else: gradients and buffers against float64, optimizers on equal gradients, later steps within noise."""
    plain, run = reference.plain.shelf, fitted.outcome.shelf
    yard = yardstick(reference)
    seen = [key for key in plain.keys("gradients") if key not in fitted.unseen]
    yield from (judged(key, yard, reference, fitted) for key in (*seen, *plain.keys("buffers")))
    yield from _new(("gradients", "buffers"), plain, run)
    yield from (bits(key, plain, run) for key in plain.keys("rng"))
    yield from _optimizers(reference, fitted)
    yield from _a_step_later(reference, fitted, lambda keys, error: _finely_later(keys, error, reference))
    eps = max(torch.finfo(p.dtype).eps for p in reference.places.parameters if p.is_floating_point())
    yield from loss_checks(
        reference.plain.losses, fitted.outcome.losses, noise_of_losses(reference.plain, reference.moved, eps, _TRAJECTORY)
    )
    yield from at_the_end(reference, fitted, finely(reference, _TRAJECTORY))


def rounded(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """Fewer bits: as reordered without float64, with the coarse type's eps; optimizers' updates on equal gradients within 12 eps."""
    plain, run, eps = reference.plain, fitted.outcome, fitted.eps
    moved = reference.roughly_moved(eps)
    yard = Yardstick(plain.shelf, plain.shelf, (moved.shelf,), eps)
    yield from loss_checks(plain.losses, run.losses, noise_of_losses(plain, moved, eps, 3))
    yield from (yard.check(key, run.shelf) for key in plain.shelf.keys("gradients") if key not in fitted.unseen)
    yield from (yard.check(key, run.shelf) for key in plain.shelf.keys("buffers"))
    yield from _new(("gradients", "buffers"), plain.shelf, run.shelf)
    yield from _a_step_later(
        reference, fitted, lambda keys, error: 3 * max(4 * eps * _norm(keys, plain.shelf), _apart(keys, plain.shelf, moved.shelf))
    )
    yield from (bits(key, plain.shelf, run.shelf) for key in plain.shelf.keys("rng"))
    yield from at_the_end(reference, fitted, roughly(reference, moved, 3, eps))
    for key in plain.shelf.keys("parameters"):
        error = distance(plain.shelf.get(key), fitted.fed.shelf.get(key))
        yield Check("parameters", told(key), error, 12 * eps * distance(plain.shelf.get(key), reference.start.get(key)))


def redrawn(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """Other random numbers: only what does not depend on them can be compared, the optimizers and what counts steps."""
    plain, run = reference.plain.shelf, fitted.outcome.shelf
    yield from (bits(key, plain, run) for key in plain.keys("buffers") if not plain.get(key).is_floating_point())
    yield from counters_at_the_end(reference, fitted)
    yield from _optimizers(reference, fitted)


RULES: dict[str, Rule] = {"bitwise": bitwise, "reordered": reordered, "redrawn": redrawn, "rounded": rounded, "altered": rounded}


def noise_of_losses(plain: Outcome, moved: Outcome, eps: float, times: float) -> list[dict[str, float]]:
    """How far each loss may be off: so many times the most that rounding has made of it so far, or 4 eps of it."""
    most: dict[str, float] = {}
    bounds = []
    for losses, other in zip(plain.losses, moved.losses, strict=True):
        for name, loss in losses.items():
            most[name] = max(most.get(name, 0.0), abs(loss - other[name]), 4 * eps * abs(loss))
        bounds.append({name: times * noise for name, noise in most.items()})
    return bounds


def _equal_bits(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    plain, run = reference.plain.shelf, fitted.outcome.shelf
    for key in dict.fromkeys((*plain, *run)):
        if key not in fitted.unseen:
            yield bits(key, plain, run)
    nothing = [dict.fromkeys(losses, 0.0) for losses in reference.plain.losses]
    yield from loss_checks(reference.plain.losses, fitted.outcome.losses, nothing)


def _within_repeats(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    plain, again, run = reference.plain.shelf, reference.again.shelf, fitted.outcome.shelf
    for key in dict.fromkeys((*plain, *run)):
        if key in fitted.unseen or (key in plain) != (key in again):
            continue
        if key not in plain or key not in run or same_bits(plain.get(key), again.get(key)):
            yield bits(key, plain, run)
        elif key.kind not in ("rng", "end rng"):  # between two states of a generator there is no distance
            noise = distance(plain.get(key), again.get(key))
            yield Check(key.kind, told(key), distance(run.get(key), plain.get(key)), 3 * noise)
    losses = zip(reference.plain.losses, reference.again.losses, strict=True)
    bounds = [{name: 3 * abs(loss - second[name]) for name, loss in first.items()} for first, second in losses]
    yield from loss_checks(reference.plain.losses, fitted.outcome.losses, bounds)


def _a_step_later(reference: Reference, fitted: FittedRun, allowed: Callable[[Sequence[Key], float], float]) -> Iterator[Check]:
    """Each phase's gradients of the second step together: something stale from the first shows here, long before it shows in a loss.

    `allowed` is how far those of these keys may be off, given how far they are.
    """
    plain, run = reference.plain.shelf, fitted.outcome.shelf
    yield from (bits(key, plain, run) for key in plain.keys("later") if key not in run and key not in fitted.unseen)
    yield from _new(("later",), plain, run)
    for phase in reference.step.all_phases:
        keys = [key for key, _ in reference.places.gradients(reference.step, phase, "later") if key in plain and key in run]
        if keys:
            what = f"all gradients{f' of {phase.name}' if phase.name else ''}, a step later,"
            error = _apart(keys, plain, run)
            yield Check("later", what, error, allowed(keys, error), len(keys))


def _finely_later(keys: Sequence[Key], error: float, reference: Reference) -> float:
    """What a last bit makes of them, and where that is too little what the order of long sums does."""
    plain = reference.plain.shelf
    size = math.hypot(*(4 * torch.finfo(plain.get(key).dtype).eps * distance(plain.get(key)) for key in keys))
    bound = max(_TRAJECTORY * max(_apart(keys, plain, reference.moved.shelf), size), SAME_IN_FLOAT32 * _norm(keys, plain))
    if error <= bound:
        return bound
    return max(bound, _TRAJECTORY * max((_apart(keys, plain, other.shelf) for other in reference.resummed), default=0.0))


def _new(kinds: Iterable[str], plain: Shelf, run: Shelf) -> Iterator[Check]:
    """What only the fitted run has."""
    return (bits(key, plain, run) for kind in kinds for key in run.keys(kind) if key not in plain)


def _apart(keys: Iterable[Key], a: Shelf, b: Shelf) -> float:
    return math.hypot(*(distance(a.get(key), b.get(key) if key in b else None) for key in keys))


def _norm(keys: Iterable[Key], shelf: Shelf) -> float:
    return math.hypot(*(distance(shelf.get(key)) for key in keys))


def _optimizers(reference: Reference, fitted: FittedRun) -> Iterator[Check]:
    """On equal gradients: the same bits, or (a fused kernel) no farther from float64 than 3 times the plain optimizer is."""
    plain, fed = reference.plain.shelf, fitted.fed.shelf
    for key in (key for kind in _STATE for key in plain.keys(kind)):
        check = bits(key, plain, fed)
        in_doubt = not check.holds and key in fed and not reference.fed.failure and key in reference.fed.shelf
        yield _as_near(key, reference, fed) if in_doubt else check
    yield from _new(_STATE, plain, fed)


def _as_near(key: Key, reference: Reference, fed: Shelf) -> Check:
    truth, plain = reference.fed.shelf.get(key), reference.plain.shelf.get(key)
    moved = distance(truth, reference.start.get(key) if key in reference.start else None)
    eps = torch.finfo(plain.dtype).eps if plain.is_floating_point() else 0.0
    return Check(key.kind, told(key), distance(fed.get(key), truth), 3 * max(distance(plain, truth), 4 * eps * moved))
