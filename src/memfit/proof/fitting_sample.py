"""How much of a batch the plain step can be run on inside a limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memfit.errors import CannotSimulate, Infeasible, MemfitError
from memfit.profiling import profile
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.limit import Limit
from memfit.proof.sampling import first_samples
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
    in_file: bool = False


def sample_inside(
    step: Step,
    limit: Limit | None,
    wants_float64: bool,
    plain: Ledger | None = None,
    smaller_batch: Batch = None,
    least: int = 1,
) -> Sample:
    """The largest part of the batch on which the plain step, in float64 too if wanted, is predicted to stay inside the limit.

    `plain` is the ledger of the step on all of it, where that is known already. Where not even `least` samples do, it is the user's
    smaller batch, if there is one, or as many with what autograd keeps in a file; Infeasible where there is no room for that either.
    """
    if limit is None:
        return Sample(step)
    limit_bytes = limit.bytes
    whole = step.batch_size
    sizes = [whole // 2**halvings for halvings in range(whole.bit_length())]
    needs: dict[int, tuple[int, int]] = {}
    base = 0
    for size in sizes:  # with float64, unless that leaves a single sample, which says little of a batch, or too few to divide
        if size not in (whole, 1) and base + (needs[whole][0] - base) * size // whole > limit_bytes:
            continue  # samples alone would fill it: not worth a simulation
        try:
            ledger = plain if plain and size == whole else _profiled(step, size)
        except CannotSimulate:
            if not limit.of_machine:
                raise
            return Sample(step)  # nothing can be predicted, and nobody asked
        if ledger is None:
            sizes = list(needs)
            break
        needs[size] = ledger.process_high_bytes, ledger.process_high_bytes + ledger.high_bytes  # plain, and in float64
        base = ledger.process.base_bytes
        if wants_float64 and needs[size][1] <= limit_bytes and size >= min(max(2, least), whole):
            return _cut(step, size, True, needs[whole][0], limit)
        if not wants_float64 and needs[size][0] <= limit_bytes:
            return _cut(step, size, False, needs[whole][0], limit)
    inside = [size for size in needs if needs[size][0] <= limit_bytes]
    if inside and inside[0] >= min(least, whole):
        return _cut(step, inside[0], False, needs[whole][0], limit)
    if smaller_batch is not None:
        return _on_smaller(step, smaller_batch, limit, wants_float64, needs[sizes[-1]][0])
    for size in dict.fromkeys((max(min(least, whole), min(sizes)), min(sizes))):
        if size in inside:
            return _cut(step, size, False, needs[whole][0], limit)
        in_file = _need_in_file(step, size)
        if in_file <= limit_bytes:
            cut = _cut(step, size, False, needs[whole][0], limit)
            return replace(cut, in_file=True, notes=(*cut.notes, _IN_FILE))
    raise _no_room(limit, needs[sizes[-1]][0], in_file, "a single sample" if sizes[-1] == 1 else "the batch, which cannot be cut,")


def _profiled(step: Step, size: int) -> Ledger | None:
    """The plain step on its first samples; None where its loss does not take fewer, as one that has no samples."""
    try:
        return profile(replace(step, batch=first_samples(step.batch, size, step.running.places)), simulate=True)
    except MemfitError:
        raise
    except Exception:
        if size == step.batch_size:
            raise
        return None


def _no_room(limit: Limit, needed: int, in_file: int, what: str) -> Infeasible:
    return Infeasible(
        f"The plain step cannot be run inside {format_bytes(limit.bytes)}{limit.whose}: {what} is predicted to need "
        f"{format_bytes(needed)}, and {format_bytes(in_file)} with what autograd keeps in a file, so there is nothing to compare with. "
        "Give a larger --budget or --limit, or write the plan here (memfit plan -o) and prove it where there is more memory "
        "(memfit verify); in Python a smaller_batch (smaller volumes, shorter sequences) to compare on helps as well.",
        min(needed, in_file),
        {},
    )


def _need_in_file(step: Step, size: int) -> int:
    fewer = replace(step, batch=first_samples(step.batch, size, step.running.places))
    with kept_in_file(fewer):
        return profile(fewer, simulate=True).process_high_bytes


def _on_smaller(step: Step, batch: Batch, limit: Limit, wants_float64: bool, needed: int) -> Sample:
    """The same models and levers on smaller samples: the same operators on other sizes."""
    smaller = replace(step, batch=batch)
    ledger = profile(smaller, simulate=True)
    if ledger.process_high_bytes > limit.bytes:
        raise Infeasible(
            f"The smaller_batch is not small enough: the plain step on it is predicted to need {format_bytes(ledger.process_high_bytes)}, "
            f"and {limit.reason}. Give a smaller one, or a larger budget or limit.",
            ledger.process_high_bytes,
            {},
        )
    shapes = ", ".join("×".join(map(str, t.shape)) for _, t in tensors_in(batch))
    note = (
        f"Compared on the smaller batch that was given ({shapes}): one sample of the plain step is predicted to need "
        f"{format_bytes(needed)}, and {limit.reason}. What only shows at full size was not compared."
    )
    return Sample(smaller, wants_float64 and ledger.process_high_bytes + ledger.high_bytes <= limit.bytes, (note,))


def _cut(step: Step, size: int, float64: bool, needed: int, limit: Limit) -> Sample:
    whole = step.batch_size
    if size == whole:
        return Sample(step, float64)
    note = (
        f"Compared on the first {size} of {whole} samples: the plain step is predicted to need {format_bytes(needed)} for all of them, "
        f"and {limit.reason}. What only shows on the other {whole - size}, or on a batch of {whole}, was not compared."
    )
    return Sample(replace(step, batch=first_samples(step.batch, size, step.running.places)), float64, (note,))
