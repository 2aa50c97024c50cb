"""The other question people ask: the largest batch that fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch

from memfit.capture.process import warmed_up_once
from memfit.capture.simulation import built_without_memory
from memfit.errors import Infeasible, MemfitError
from memfit.fitting.planning import find_plan
from memfit.levers import LEVERS, Lever
from memfit.profiling import profile
from memfit.records import Ledger
from memfit.step import Step
from memfit.step.batches import batch_size, map_tensors
from memfit.step.samples import map_samples

_AT_MOST = 64  # times the sample's size: beyond, nobody asks for a step that is still the same training
_PROBES = 5  # simulations that follow the step's growth, before what is left is searched as if nothing were known of it
_CLOSE = 16  # a size is known when one larger by this part of it is known not to fit


@dataclass(frozen=True)
class LargestBatch:
    """How many samples fit: as the step is, and with the allowed levers, without and with micro-batching. 0: not even one.

    Each size was tried and fits, and one that is larger by a sixteenth, or by one sample, was tried and does not; nothing above
    `tried_up_to` was tried.
    """

    plain: int
    without_microbatch: int
    with_microbatch: int
    tried_up_to: int


def largest_batch(
    step: Step,
    budget: int,
    *,
    allow: str = "reordered",
    device: str | None = None,
    host_budget: str | int | None = None,
    levers: Mapping[str, Lever] = LEVERS,
    progress: Callable[[str], None] = lambda words: None,
) -> LargestBatch:
    """The largest batches whose simulation is inside the budget. Batches of other sizes repeat or cut the sample's samples.

    A step built without memory is asked without memory; a real one has its batch made larger for real.
    """
    most = _AT_MOST * step.batch_size
    seen: list[Ledger] = []
    asked: dict[str, Any] = {"allow": allow, "device": device, "host_budget": host_budget, "quick": True}

    def high_of(samples: int) -> int:
        progress(f"simulating a batch of {samples}")
        seen.append(_profiled(resized(step, samples), device))
        return warmed_up_once(seen[-1], seen[0]).process_high_bytes

    def fits_with(some: Mapping[str, Lever]) -> Callable[[int], bool]:
        def fits(samples: int) -> bool:
            if not some:  # nothing but the step as it is, which was asked already
                return False
            progress(f"planning a batch of {samples}")
            try:
                return find_plan(resized(step, samples), budget, levers=some, first=seen[0], **asked).plan.feasible
            except Infeasible:
                return False

        return fits

    plain = _by_growth(high_of, step.batch_size, budget, most)
    whole = _by_trying(fits_with({word: lever for word, lever in levers.items() if word != "microbatch"}), plain, most)
    return LargestBatch(plain, whole, _by_trying(fits_with(levers), whole, most), most)


def _profiled(step: Step, device: str | None) -> Ledger:
    try:
        return profile(step, simulate=True, device=device)
    except MemfitError:
        raise
    except Exception as error:
        raise MemfitError(
            f"The loss does not take a batch of {step.batch_size} made from the step's own ({type(error).__name__}: {error}). The batch's "
            "first tensor tells its number of samples: put one that has a row for each sample first."
        ) from error


def resized(step: Step, samples: int) -> Step:
    """The step on a batch of so many samples, its variants and the batches of its loader as well.

    >>> net = torch.nn.Linear(1, 1)
    >>> step = Step(net, lambda m, b: m(b).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.tensor([[1.0], [2.0]]))
    >>> resized(step, 5).batch.flatten().tolist(), resized(step, 1).batch.flatten().tolist()
    ([1.0, 2.0, 1.0, 2.0, 1.0], [1.0])
    """
    whole = batch_size(step.batch)
    running = replace(step.running, loader_batches=step.running.loader_batches * samples / whole)
    variants = {name: partial(_variant_resized, build, samples) for name, build in step.variants.items()}
    batch = step.batch if samples == whole else _batch_of(step.batch, whole, samples)
    return replace(step, batch=batch, running=running, variants=variants)


def _variant_resized(build: Callable[[], Step], samples: int) -> Step:
    variant = built_without_memory(build)
    return resized(variant, samples) if isinstance(variant, Step) else variant


def _batch_of(batch: Any, whole: int, samples: int) -> Any:
    often = -(-samples // whole)

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.repeat(often, *[1] * (t.dim() - 1))[:samples].clone()

    def entries(listed: Any) -> Any:
        if isinstance(listed, np.ndarray):
            return np.concatenate([listed] * often)[:samples]
        return map_tensors(torch.clone, (listed * often)[:samples])  # a tensor that is there twice takes its memory twice

    return map_samples(rows, entries, batch, whole)


def _by_growth(high_of: Callable[[int], int], sample: int, budget: int, most: int) -> int:
    """Two sizes give the growth of each further sample; the size it leads to is simulated, and teaches the growth around it."""
    known = {size: high_of(size) for size in (sample, 2 * sample)}
    for _ in range(_PROBES):
        guess = _guess(known, budget, most)
        if guess in known or not guess:
            break
        known[guess] = high_of(guess)
    low = max((size for size, high in known.items() if high <= budget), default=0)
    no = min((size for size, high in known.items() if high > budget), default=most + 1)
    return _narrowed(lambda size: high_of(size) <= budget, low, no, low + max(1, low // _CLOSE))


def _guess(known: Mapping[int, int], budget: int, most: int) -> int:
    """On the line through the two known sizes nearest to the budget; never beyond one that is known not to fit."""
    sizes = sorted(known)
    inside = [size for size in sizes if known[size] <= budget]
    upper = sizes[min(max(len(inside), 1), len(sizes) - 1)]
    lower = sizes[sizes.index(upper) - 1]
    each = max(1, (known[upper] - known[lower]) // (upper - lower))
    guess = min(most, max(0, lower + (budget - known[lower]) // each))
    if not inside:
        return min(guess, lower - 1)
    return max(guess, inside[-1]) if len(inside) == len(sizes) else min(max(guess, lower), upper - 1)


def _by_trying(fits: Callable[[int], bool], low: int, most: int) -> int:
    """From a size that is known to fit upwards, in strides that grow with each yes, then between the last yes and the first no."""
    stride, no = 2, most + 1
    while low < most and no > most:
        guess = min(most, max(1, low * stride))
        low, no, stride = (guess, no, stride**2 if low else stride) if fits(guess) else (low, guess, stride)
    return _narrowed(fits, low, no)


def _narrowed(fits: Callable[[int], bool], low: int, no: int, first: int = 0) -> int:
    """Between a yes and a no, each guess as many times above the one as below the other; `first` where a guess is known to be good."""
    while no - low > max(1, low // _CLOSE):
        guess = first if low < first < no else max(low + 1, isqrt(low * no))
        low, no, first = (guess, no, 0) if fits(guess) else (low, guess, 0)
    return low
