"""How much of a batch the plain step can be run on inside a limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.errors import CannotSimulate, Infeasible
from memfit.proof.limit import Limit
from memfit.proof.needs import IN_FLOAT64, Needs, cut_to
from memfit.proof.room import Room
from memfit.records import Ledger
from memfit.step import Batch, Step
from memfit.step.batches import tensors_in
from memfit.units import format_bytes

_IN_FILE = "The plain step does not fit the limit: what autograd keeps of it waited in a file, bit for bit, and nothing else was changed."


@dataclass(frozen=True)
class Sample:
    """The step to be proven with: on all samples or on fewer, with a float64 run or without, kept in memory or in a file."""

    step: Step
    float64: bool = True
    notes: tuple[str, ...] = ()
    room: Room | None = None  # for levers, where the plain step has none: every run of it keeps its tensors in a file
    moved_in_file: bool = False  # the runs that measure what rounding does

    @property
    def in_file(self) -> bool:
        """Whether what autograd keeps of the plain step does not fit in memory."""
        return self.room is not None


def sample_inside(
    step: Step,
    limit: Limit | None,
    exactness: str,
    plain: Ledger | None = None,
    smaller_batch: Batch = None,
    least: int = 1,
) -> Sample:
    """The largest part of the batch on which every run of the plain step that this class asks for is predicted to stay inside the limit.

    `plain` is the ledger of the step on all of it, where that is known already. Where there is no room for that on `least` samples, it
    is done without float64, and the noise of rounding measured with what autograd keeps in a file; then on the user's smaller batch, if
    there is one; then with all in a file. Infeasible where there is no room for that either.
    """
    if limit is None:
        return Sample(step)
    whole, needs = step.batch_size, Needs(step, exactness, plain)
    enough = min(max(2, least) if needs.is_moved else least, whole)  # a single sample says little of a batch
    seen = []
    try:
        for size in needs.sizes(limit.bytes):
            if size >= enough and needs.at_most(size) <= limit.bytes:
                return _cut(Sample(step, exactness in IN_FLOAT64), size, needs, limit)
            seen.append(size)
    except CannotSimulate:
        if not limit.of_machine:
            raise
        return Sample(step)  # nothing can be predicted, and nobody asked
    least = max(min(least, whole), seen[-1])
    inside = [size for size in seen if size >= least and needs.plain(size) <= limit.bytes]
    if smaller_batch is not None and not inside:
        return _on_smaller(step, smaller_batch, limit, exactness, needs.plain(seen[-1]))
    for size in dict.fromkeys((*inside, least, seen[-1])):
        if sample := _with_a_file(step, size, needs, limit):
            return sample
    what = "a single sample" if seen[-1] == 1 else "the batch, which cannot be cut,"
    raise _no_room(limit, needs.plain(seen[-1]), needs.in_file(seen[-1]), what)


def _with_a_file(step: Step, size: int, needs: Needs, limit: Limit) -> Sample | None:
    """What does not fit in memory waits in a file; None where that does not fit either."""
    inside = needs.plain(size) <= limit.bytes
    if (needs.is_moved or not inside) and needs.in_file(size) > limit.bytes:
        return None
    if inside:
        return _cut(Sample(step, False, moved_in_file=needs.is_moved), size, needs, limit)
    room = Room(limit, needs.ledger(size), needs.copy(size))
    return _cut(Sample(step, False, (_IN_FILE,), room, needs.is_moved), size, needs, limit)


def _no_room(limit: Limit, needed: int, in_file: int, what: str) -> Infeasible:
    return Infeasible(
        f"The plain step cannot be run inside {format_bytes(limit.bytes)}{limit.whose}: {what} is predicted to need "
        f"{format_bytes(needed)}, and {format_bytes(in_file)} with what autograd keeps in a file, so there is nothing to compare with. "
        "Give a larger --budget or --limit, or write the plan here (memfit plan -o) and prove it where there is more memory "
        "(memfit verify); in Python a smaller_batch (smaller volumes, shorter sequences) to compare on helps as well.",
        min(needed, in_file),
        {},
    )


def _on_smaller(step: Step, batch: Batch, limit: Limit, exactness: str, needed: int) -> Sample:
    """The same models and levers on smaller samples: the same operators on other sizes."""
    smaller = replace(step, batch=batch)
    needs = Needs(smaller, exactness)
    size, shapes = smaller.batch_size, ", ".join("×".join(map(str, t.shape)) for _, t in tensors_in(batch))
    note = (
        f"Compared on the smaller batch that was given ({shapes}): one sample of the plain step is predicted to need "
        f"{format_bytes(needed)}, and {limit.reason}. What only shows at full size was not compared."
    )
    if needs.at_most(size) <= limit.bytes:
        return Sample(smaller, exactness in IN_FLOAT64, (note,))
    found = _with_a_file(smaller, size, needs, limit) if needs.plain(size) <= limit.bytes else None
    if found is None:
        raise Infeasible(
            f"The smaller_batch is not small enough: the plain step on it is predicted to need {format_bytes(needs.at_most(size))}, "
            f"and {limit.reason}. Give a smaller one, or a larger budget or limit.",
            needs.at_most(size),
            {},
        )
    return replace(found, notes=(note,))


def _cut(sample: Sample, size: int, needs: Needs, limit: Limit) -> Sample:
    whole = sample.step.batch_size
    if size == whole:
        return sample
    note = (
        f"Compared on the first {size} of {whole} samples: the plain step is predicted to need {format_bytes(needs.plain(whole))} for all "
        f"of them, and {limit.reason}. What only shows on the other {whole - size}, or on a batch of {whole}, was not compared."
    )
    return replace(sample, step=cut_to(sample.step, size), notes=(note, *sample.notes))
