"""A trace as it would be under autocast: what was drawn, with the lives of its storages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from memfit.levers.precision_drawing import Cast, Drawing, Life
from memfit.levers.precision_ops import LOWERED, outermost_calls, word
from memfit.records import Op, Storage, Trace


def is_cast_anywhere(trace: Trace) -> bool:
    """Whether a module runs a convolution or a matrix product in float32."""
    inside = outermost_calls(trace)
    return any(
        word(op) in LOWERED and inside[number] >= 0 and any(trace.storages[s].dtype == "float32" for s in op.inputs)
        for number, op in enumerate(trace.ops)
        if op.phase == "forward"
    )


def under_autocast(trace: Trace, dtype: str) -> Trace:
    """The trace with every module under autocast to `dtype`."""
    return _Assembly(Drawing(trace, dtype).draw()).trace()


class _Assembly:
    """From a drawing to a trace."""

    def __init__(self, drawn: Drawing) -> None:
        self._drawn = drawn

    def trace(self) -> Trace:
        """Lives first, then everything together."""
        self._draw_lives()
        return self._assembled()

    def _draw_lives(self) -> None:
        keepers: dict[int, set[int]] = {}
        for saved in self._drawn.old.saved:
            keepers.setdefault(saved.storage, set()).add(saved.op)
        for s, life in enumerate(self._drawn.lives):
            life.died = self._death(s, keepers.get(s, set()))
        for cast in self._drawn.casts:
            cast.life.died = self._death_of_cast(cast, keepers.get(cast.source, set()))

    def _death(self, s: int, keepers: set[int]) -> int | None:
        died = self._drawn.old.storages[s].died
        if died is None:
            return None
        remaining = {f for f in keepers if self._drawn.read(f, s) is self._drawn.lives[s]}
        read_last = max((cast.life.born for cast in self._drawn.casts if cast.source == s), default=-1)
        if remaining != keepers or s in self._drawn.left:
            used = [n for n in self._drawn.readers.get(s, ()) if self._drawn.read(n, s) is self._drawn.lives[s]]
            done = [self._drawn.last_of.get(f, died) for f in remaining]
            died = min(died, max([*used, *done, self._drawn.old.storages[s].born]))
        return max(self._drawn.at[died], read_last)

    def _death_of_cast(self, cast: Cast, keepers: set[int]) -> int | None:
        ends = [self._drawn.at[f] for f in cast.readers]
        if cast is self._drawn.left.get(cast.source):
            # a call holds its arguments until it returns
            ends += [self._end_of_call(f) for f in cast.readers if self._drawn.inside[f] >= 0]
            old = self._drawn.old.storages[cast.source].died
            if old is None:
                return None
            if old > max((self._drawn.last_of.get(f, -1) for f in keepers), default=-1):  # somebody held it longer than autograd
                ends.append(self._drawn.at[old])
            keepers = {f for f in keepers if self._drawn.read(f, cast.source) is cast.life}
        elif len(cast.readers) and self._drawn.old.storages[cast.source].kind == "parameters" and cast.life.half:
            ends.append(self._end_of_call(cast.readers[-1]) if self._drawn.is_trained(self._drawn.old.storages[cast.source].name) else -1)
        ends += [self._drawn.at[self._drawn.last_of.get(f, f)] for f in cast.readers if f in keepers]
        return max(ends)

    def _end_of_call(self, number: int) -> int:
        call = self._drawn.inside[number]
        while number + 1 < len(self._drawn.inside) and self._drawn.inside[number + 1] == call:
            number += 1
        return self._drawn.at[number]

    def _assembled(self) -> Trace:
        lives = [*self._drawn.lives, *(cast.life for cast in self._drawn.casts), *self._drawn.extra]
        storages = [self._held_by_guard(self._storage(life)) for life in lives] + list(self._copies_of_buffers())
        last = len(self._drawn.at) - 1
        saved = [
            replace(s, op=self._drawn.at[s.op], read=None if s.read is None else self._drawn.at[min(s.read, last)])
            for s in self._drawn.old.saved
        ]
        calls = [replace(c, first=self._drawn.at[c.first], last=self._drawn.at[c.last]) for c in self._drawn.old.calls]
        ops = [replace(op, forward=None if op.forward is None else self._drawn.at[op.forward]) for op in self._drawn.ops]
        return replace(
            self._drawn.old,
            ops=tuple(ops),
            storages=tuple(storages),
            saved=tuple(saved),
            calls=tuple(calls),
            step_seconds=self._seconds(ops),
        )

    def _storage(self, life: Life) -> Storage:
        size, dtype = life.storage.bytes, life.storage.dtype
        if life.half:
            size, dtype = -(-size // 2), self._drawn.dtype
            size = -(-size // 512) * 512 if self._drawn.old.device == "cuda" else size
        return replace(life.storage, bytes=size, dtype=dtype, born=life.born, died=life.died)

    def _copies_of_buffers(self) -> Iterable[Storage]:
        """The guard keeps what buffers were, from a phase's first op to its optimizer."""
        buffers = [s for s in self._drawn.old.storages if _is_buffer(s) and _may_change(s)]
        for first, last in self._guarded:
            yield from (replace(s, born=first, died=last, name="") for s in buffers)

    def _held_by_guard(self, storage: Storage) -> Storage:
        """A buffer that the forward exchanges for another stays until the guard has let the phase go."""
        died = storage.died
        if not _is_buffer(storage) or died is None:
            return storage
        return replace(storage, died=max([died, *(last for first, last in self._guarded if first <= died)]))

    @cached_property
    def _guarded(self) -> list[tuple[int, int]]:
        """The ops of each phase up to its optimizer."""
        phases: dict[str, list[int]] = {}
        for number, op in enumerate(self._drawn.ops):
            if op.phase != "optimizer":
                phases.setdefault(op.loss, []).append(number)
        return [(numbers[0], numbers[-1]) for numbers in phases.values()]

    def _seconds(self, ops: Sequence[Op]) -> float | None:
        if self._drawn.old.step_seconds is None:
            return None
        return self._drawn.old.step_seconds + sum(op.seconds or 0.0 for op in ops) - sum(op.seconds or 0.0 for op in self._drawn.old.ops)


def _is_buffer(storage: Storage) -> bool:
    return storage.born < 0 and storage.kind == "other" and bool(storage.name)


def _may_change(storage: Storage) -> bool:
    return storage.dtype != "bool" or len(storage.shape) < 2  # tables of yes and no are masks
