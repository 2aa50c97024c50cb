"""What every finder looks at: the trace, its peak, and who reads and keeps what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from memfit.ledger.findings.operators import word
from memfit.ledger.owners import category_of
from memfit.ledger.timeline import alive_at, last_op
from memfit.records import Op, Owner, Storage, Trace

_ALWAYS_WORTH_TELLING = 2**20
_SHARE_WORTH_TELLING = 0.005


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

    def most_bytes(self, numbers: Iterable[int]) -> int:
        """The most bytes of some storages that are ever alive together."""
        lives = [self.trace.storages[number] for number in numbers]
        count = len(self.trace.ops)
        return max((sum(s.bytes for s in lives if s.born <= op <= last_op(s, count)) for op in {s.born for s in lives}), default=0)

    def is_worth_telling(self, size: int) -> bool:
        """Whether bytes are many, by themselves or in this step."""
        return size >= _ALWAYS_WORTH_TELLING or size >= _SHARE_WORTH_TELLING * self.peak
