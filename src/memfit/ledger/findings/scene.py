"""What every finder looks at: the trace, its peak, and who reads and keeps what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from memfit.ledger.batch_statistics import takes_batch_statistics
from memfit.ledger.findings.operators import word
from memfit.ledger.findings.words import share, where_most_is
from memfit.ledger.owners import category_of
from memfit.ledger.timeline import alive_at, last_op
from memfit.records import Op, Owner, Storage, Trace
from memfit.units import format_bytes

_ALWAYS_WORTH_TELLING = 2**20
_SHARE_WORTH_TELLING = 0.005
_SHARE_WHEN_GONE = 0.05  # what is not there at the peak matters only once the peak is lowered


@dataclass(frozen=True)
class Scene:
    """A trace seen from its peak."""

    trace: Trace
    owners: tuple[Owner, ...]
    peak_op: int

    @cached_property
    def peak(self) -> int:
        """Bytes alive at the peak."""
        return sum(owner.bytes for owner in self.owners)

    @cached_property
    def alive(self) -> dict[int, Storage]:
        """What is alive at the peak, by number."""
        return dict(alive_at(self.trace, self.peak_op))

    @cached_property
    def keepers(self) -> dict[int, tuple[int, ...]]:
        """For each storage that autograd keeps: the forward ops whose gradients need it."""
        found: dict[int, tuple[int, ...]] = {}
        for saved in self.trace.saved:
            found[saved.storage] = (*found.get(saved.storage, ()), saved.op)
        return found

    @cached_property
    def activations(self) -> dict[int, Storage]:
        """What is alive at the peak because autograd keeps it."""
        return {number: s for number, s in self.alive.items() if self.category(number) == "activations"}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For each storage the forward ops that read it."""
        found: dict[int, list[int]] = {}
        for number, op in self.forward_ops():
            for storage in dict.fromkeys(op.inputs):
                found.setdefault(storage, []).append(number)
        return found

    @cached_property
    def looks_at_the_batch_as_one(self) -> bool:
        """Whether a batch norm in training mode runs, which keeps the batch's statistics: then it cannot be divided."""
        return any(takes_batch_statistics(self.trace, op) for op in self.trace.ops)

    def forward_ops(self) -> Iterator[tuple[int, Op]]:
        """The ops of every forward pass, with their numbers."""
        return ((number, op) for number, op in enumerate(self.trace.ops) if op.phase == "forward")

    def category(self, number: int) -> str:
        """The ledger's category of a storage."""
        return category_of(self.trace, self.trace.storages[number], number in self.keepers)

    def elements(self, number: int) -> int:
        """How many numbers a storage holds."""
        return prod(self.trace.storages[number].shape)

    def maker(self, number: int) -> Op | None:
        """The op that made a storage, None for what was there before the step."""
        born = self.trace.storages[number].born
        return self.trace.ops[born] if born >= 0 else None

    def is_weight(self, number: int) -> bool:
        """Whether a storage is a parameter, or one cast to another precision."""
        maker = self.maker(number)
        if maker is not None and word(maker) == "_to_copy":
            return any(map(self.is_weight, maker.inputs))
        return self.trace.storages[number].kind == "parameters"

    def bytes_at_peak(self, numbers: Iterable[int]) -> int:
        """Bytes of some storages that are alive at the peak."""
        return sum(self.alive[number].bytes for number in numbers if number in self.alive)

    def weighed(self, numbers: Collection[int]) -> tuple[int, str]:
        """Bytes of some storages, and when: at the peak, or else at their largest moment; 0 when not worth telling."""
        alive, most = self.bytes_at_peak(numbers), self._most_bytes(numbers)
        if self.is_worth_telling(alive):
            return alive, f"{format_bytes(alive)}, {share(alive, self.peak)} of the peak"
        if most >= _SHARE_WHEN_GONE * self.peak:
            return most, f"{format_bytes(most)} at the largest moment, gone by the peak"
        return 0, ""

    def _most_bytes(self, numbers: Iterable[int]) -> int:
        """The most bytes of some storages that are ever alive together."""
        lives = [self.trace.storages[number] for number in numbers]
        count = len(self.trace.ops)
        return max((sum(s.bytes for s in lives if s.born <= op <= last_op(s, count)) for op in {s.born for s in lives}), default=0)

    def heart(self, numbers: Iterable[int]) -> str:
        """The module in which most of some storages were made."""
        sizes: Counter[str] = Counter()
        for number in numbers:
            maker = self.maker(number)
            sizes[maker.module if maker else ""] += self.trace.storages[number].bytes
        return where_most_is(sizes) or "the whole model"

    def is_worth_telling(self, size: int) -> bool:
        """Whether bytes are many, by themselves or in this step."""
        return size >= min(_ALWAYS_WORTH_TELLING, max(1, _SHARE_WORTH_TELLING * self.peak))
