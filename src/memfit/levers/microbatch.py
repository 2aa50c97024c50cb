"""microbatch: the batch in parts, one after the other, whose gradients add up to the whole batch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from memfit.levers.divisible import is_divisible
from memfit.levers.drawn import are_draws, draws_again_in_backward, draws_of, not_replayable
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.microbatch_line import micro_batch_line
from memfit.levers.microbatch_running import Split
from memfit.levers.picked_rows import picks_among_samples
from memfit.levers.reading import at_least, by_loss, is_bool, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option
from memfit.step import Step
from memfit.torch_private import batch_norms, instance_norms
from memfit.units import format_bytes

read_settings = reader({"size": at_least(1), "batch": at_least(1), "draws": by_loss(are_draws), "again": is_bool})


class MicroBatch:
    """Memory of a few samples at a time; the optimizer still sees the whole batch."""

    name, exactness, needs = "microbatch", "reordered", "a batch of 2 or more, and a loss that is a mean over samples"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """Micro-batches from half of the batch down to one sample; none where the forward pass may not be divided."""
        trace = trace_of(ledger)
        if not is_divisible(trace) or picks_among_samples(trace):
            return []
        settings: dict[str, Any] = {"batch": trace.batch_size, "draws": draws_of(trace), "again": draws_again_in_backward(trace)}
        why, kept = not_replayable(trace), ledger.by_category["activations"]
        if why:
            settings["draws"] = {}
        return [self._option(size, settings, why, kept) for size in sizes(trace.batch_size)]

    def _option(self, size: int, settings: dict[str, Any], why: str, kept: int) -> Option:
        count = -(-settings["batch"] // size)
        name = f"{count} micro-batches of {size}" + ("" if settings["batch"] % size == 0 else ", the last one smaller")
        exactness = "redrawn" if why else "reordered"
        held = f", {format_bytes(kept)} at the peak" if kept else ""
        words = f"activations of {settings['batch']} samples are kept at once{held}; a micro-batch keeps {size}"
        told = f"{words}; random numbers differ: {why}" if why else words
        return Option(self.name, name, exactness, {"size": size, **settings}, told)

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The line of one micro-batch; the step's seconds are those of all of them, taken to be the whole batch's."""
        line = micro_batch_line(trace_of(ledger), option.settings["size"], replays=option.exactness == "reordered")
        return rewritten(ledger, line)

    def apply(self, step: Step, option: Option) -> Undo:
        """Every batch the step gets is taken in parts of the option's size."""
        _refuse(step)
        settings, places = option.settings, step.running.places or {}
        with Undo.or_nothing() as undo:
            step.running.split = Split(settings["size"], settings["batch"], settings["draws"], settings["again"], step.weight, places)
            undo.then(setattr, step.running, "split", None)
        return undo


def sizes(batch: int) -> list[int]:
    """Micro-batch sizes worth offering, largest first: the smallest for each number of parts up to 8, then by powers of two and divisors.

    >>> sizes(12), sizes(5), sizes(1)
    ([6, 4, 3, 2, 1], [3, 2, 1], [])
    """
    powers = {2**power for power in range(batch.bit_length())}
    divisors = {size for size in range(1, min(batch, 4096)) if batch % size == 0}
    counts = {*range(2, min(batch, 8) + 1), *(-(-batch // size) for size in powers | divisors if size < batch)}
    return sorted({-(-batch // count) for count in counts}, reverse=True)


def _refuse(step: Step) -> None:
    if step.running.split is not None:
        raise CannotApply("microbatch is already applied to this step: undo the first one, then apply another.")
    if step.running.steps_in_backward:
        raise CannotApply(
            "microbatch cannot join an optimizer that steps inside backward: it would step after every micro-batch, with a part of "
            "the gradient. Take one of the two."
        )
    if step.batch_size < 2:
        raise CannotApply("microbatch needs a batch of at least 2 samples, and this one has 1: there is nothing to divide.")
    for prefix, model in step.models.items():
        for name, module in model.named_modules(prefix=prefix):
            if why := _mixes_samples(module):
                raise CannotApply(
                    f"microbatch cannot divide this batch: {name or 'the model'} ({type(module).__name__}) {why}. "
                    "Put it into eval mode, exchange it for GroupNorm, or leave out microbatch."
                )


def _mixes_samples(module: nn.Module) -> str:
    if isinstance(module, instance_norms()):
        return "updates its running statistics in every forward pass" if module.training and module.track_running_stats else ""
    if isinstance(module, batch_norms()) and (module.training or module.running_mean is None):
        return "normalises with the statistics of the whole batch, which a micro-batch does not have"
    return ""
