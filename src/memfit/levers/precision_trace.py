"""A trace as it would be under autocast: dtypes carried from op to op, casts put in, lives of storages drawn again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from memfit.levers.precision_ops import (
    FIRST_OUTPUT_ONLY,
    JOINED,
    KEPT_ON_CPU,
    KEPT_ON_CUDA,
    LOWERED,
    PRODUCTS,
    adds_bias_of_linear,
    is_cross_entropy,
    outermost_calls,
    word,
    written_out_attention,
)
from memfit.records import Op, Storage, Trace

_SLOWER = {("cpu", "float16"): 17.0}  # measured; bfloat16 takes about as long as float32 there


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
    return _Rewriting(trace, dtype).trace()


@dataclass
class _Life:
    """A storage of the new trace while it is drawn; `died` counts new ops."""

    storage: Storage
    half: bool
    born: int
    died: int | None


@dataclass
class _Cast:
    """A copy in another precision that autocast makes of a storage for an op."""

    source: int
    life: _Life
    readers: list[int] = field(default_factory=list)  # forward ops, by their old numbers


class _Rewriting:
    """One pass over the old ops. Old storages keep their numbers; casts come behind them."""

    def __init__(self, trace: Trace, dtype: str) -> None:
        self._old, self._dtype = trace, dtype
        self._kept = KEPT_ON_CUDA if trace.device == "cuda" else KEPT_ON_CPU
        self._inside = outermost_calls(trace)
        self._lives = [_Life(s, False, s.born, None) for s in trace.storages]
        self._casts: list[_Cast] = []
        self._of_op: dict[int, dict[int, _Cast]] = {}  # forward op, old storage: what it reads instead
        self._cached: dict[int, _Cast] = {}
        self._left: dict[int, _Cast] = {}  # storages that left their outermost module, in float32
        self._ops: list[Op] = []
        self._at: list[int] = []  # new number of each old op
        self._extra: list[_Life] = []
        self._last_of = {op.forward: n for n, op in enumerate(trace.ops) if op.forward is not None}
        self._readers: dict[int, list[int]] = {}
        for number, op in enumerate(trace.ops):
            if op.phase == "forward":
                for s in set(op.inputs):
                    self._readers.setdefault(s, []).append(number)
        self._frozen = {n for m in trace.models for n in m.frozen}
        self._recast: set[int] = set()  # gradients that have gone to another precision
        self._written_out = written_out_attention(trace)
        self._ends = {max(ops) for ops in self._written_out}
        self._full = {number for ops in self._written_out for number in ops}

    def trace(self) -> Trace:
        """Everything drawn."""
        for number, op in enumerate(self._old.ops):
            if op.phase == "forward":
                self._forward(number, op)
            elif op.phase == "backward":
                self._backward(number, op)
            else:
                self._put(number, op, half=False)
        self._draw_lives()
        return self._assembled()

    # Forward

    def _forward(self, number: int, op: Op) -> None:
        call = self._inside[number]
        if number and self._inside[number - 1] != call:
            self._cached.clear()
        lowered = call >= 0 and number not in self._full and (word(op) in LOWERED or adds_bias_of_linear(self._old, number))
        if lowered:
            self._cast_inputs(number, op, to_half=True)
        elif call >= 0 and self._is_kept(number, op):
            self._cast_inputs(number, op, to_half=False)
        self._put(number, op, lowered or self._is_half(number, op))
        if call >= 0 and number in self._ends:
            self._split(op.outputs[0], op, half=True)
        if call >= 0 and (number + 1 == len(self._inside) or self._inside[number + 1] != call):
            self._leave(call, number)

    def _is_kept(self, number: int, op: Op) -> bool:
        joins_both = word(op) in JOINED and not self._is_half(number, op)
        return number in self._full or word(op) in self._kept or joins_both or is_cross_entropy(self._old, number)

    def _cast_inputs(self, number: int, op: Op, to_half: bool) -> None:
        for s in dict.fromkeys(op.inputs):
            life = self._read(number, s)
            if life.storage.dtype != "float32" or life.half == to_half:
                continue
            cast = self._cached.get(s) or self._new_cast(s, life, to_half, op)
            if number in self._full:
                cast.life.storage = _cut_to(cast.life.storage, self._elements_of_key(number))
            if to_half and life.storage.kind == "parameters" and self._is_trained(life.storage.name):
                self._cached[s] = cast
            cast.readers.append(number)
            self._of_op.setdefault(number, {})[s] = cast

    def _elements_of_key(self, number: int) -> int:
        """Queries, keys and values may share one storage; what is cast is one of them, and the scaled keys tell its size."""
        ops = next(ops for ops in self._written_out if number in ops)
        scaled = [self._old.ops[n] for n in sorted(ops) if word(self._old.ops[n]) == "mul"]
        return prod(self._old.storages[scaled[min(1, len(scaled) - 1)].outputs[0]].shape) if scaled else 0

    def _is_trained(self, name: str) -> bool:
        parts = name.split(".")
        return not any(".".join(parts[:n]) in self._frozen for n in range(len(parts) + 1))

    def _new_cast(self, s: int, life: _Life, to_half: bool, near: Op) -> _Cast:
        cast = _Cast(s, _Life(replace(life.storage, kind="", name=""), to_half, len(self._ops), None))
        self._casts.append(cast)
        self._ops.append(self._cast_op(near, s))
        return cast

    def _cast_op(self, near: Op, s: int) -> Op:
        return Op("aten._to_copy.default", near.phase, near.loss, near.module, near.source, (s,), (), forward=near.forward)

    def _leave(self, call: int, number: int) -> None:
        """The module hands out float32: copies of what is read beyond its call."""
        made = {s for n in range(call, number + 1) for s in self._old.ops[n].outputs if self._lives[s].half}
        for s in sorted(made):
            beyond = [n for n in self._readers.get(s, ()) if n > number]
            if beyond and s not in self._left:
                self._left[s] = self._new_cast(s, self._lives[s], False, self._old.ops[number])
                self._left[s].readers += beyond

    def _read(self, number: int, s: int) -> _Life:
        """What an op reads where it read an old storage: the storage itself, a cast for it, or the copy that left a module."""
        if cast := self._of_op.get(number, {}).get(s):
            return cast.life
        if s in self._left and number in self._left[s].readers:
            return self._left[s].life
        return self._lives[s]

    def _is_half(self, number: int, op: Op, reading: int | None = None) -> bool:
        """What torch's promotion makes of an op's inputs; one number among tensors does not count."""
        reading = number if reading is None else reading
        lives = [self._read(reading, s) for s in op.inputs]
        floats = [life for life in lives if life.storage.dtype == "float32"]
        counted = [life for life in floats if prod(life.storage.shape) > 1] or floats
        if word(op).startswith(FIRST_OUTPUT_ONLY):
            counted = counted[:1]
        return bool(counted) and all(life.half for life in counted)

    def _put(self, number: int, op: Op, half: bool) -> None:
        """The op itself, and the precision of what it makes."""
        new = [s for s in dict.fromkeys(op.outputs) if self._old.storages[s].born == number and self._old.storages[s].dtype == "float32"]
        for s in new[:1] if word(op).startswith(FIRST_OUTPUT_ONLY) else new:
            self._lives[s].half = half
        for s in op.outputs:
            if self._old.storages[s].born == number:
                self._lives[s].born = len(self._ops)
        self._at.append(len(self._ops))
        touched = half and word(op) != "_to_copy"
        self._ops.append(self._in_half(op) if touched else op)

    def _in_half(self, op: Op) -> Op:
        measured = getattr(op, f"{self._dtype}_workspace")
        inside = measured if measured is not None else self._workspace(op) if self._old.device == "cpu" else op.workspace // 2
        slower = _SLOWER.get((self._old.device, self._dtype), 1.0) if word(op).startswith(tuple(LOWERED)) else 1.0
        seconds = None if op.seconds is None else op.seconds * slower
        unsure = 0 if measured is not None else max(inside, op.workspace) if word(op).startswith("convolution") else inside
        return replace(op, workspace=inside, workspace_error=op.workspace_error + unsure, seconds=seconds)

    def _workspace(self, op: Op) -> int:
        """What a CPU takes inside: products sum in float32; convolutions copy their tensors, and never make columns as float32 ones may."""
        if word(op) in PRODUCTS:
            return 4 * sum(prod(self._old.storages[s].shape) for s in op.outputs) + 128
        tensors = sum(self._old.storages[s].bytes // 2 for s in {*op.inputs[:2], *op.outputs[:1]})
        if word(op) == "convolution":
            return min(op.workspace // 2, tensors)
        if word(op) == "convolution_backward":
            return min(op.workspace * 3 // 4, 3 * tensors // 2)
        return op.workspace // 2

    # Backward

    def _backward(self, number: int, op: Op) -> None:
        reading = number if op.forward is None else op.forward
        self._enter_modules(number, op)
        self._put(number, op, self._is_half(number, op, reading))
        if op.forward is not None and self._last_of[op.forward] == number:
            self._cast_back(number, op)

    def _enter_modules(self, number: int, op: Op) -> None:
        """A gradient that comes from outside of a module is cast to what the module handed out."""
        if op.forward is None or self._inside[op.forward] < 0:
            return
        if op.forward in self._ends:
            for g in [g for g in dict.fromkeys(op.inputs) if self._is_gradient(g) and self._lives[g].half and g not in self._recast]:
                self._split(g, op, half=False)
        call = self._inside[op.forward]
        sizes = {prod(self._old.storages[s].shape) for s in self._left if self._inside[self._old.storages[s].born] == call}
        for g in filter(self._is_gradient, dict.fromkeys(op.inputs)):
            maker = self._old.ops[self._old.storages[g].born].forward
            from_outside = maker is None or self._inside[maker] != call
            if from_outside and not self._lives[g].half and prod(self._old.storages[g].shape) in sizes:
                self._split(g, op, half=True)

    def _is_gradient(self, s: int) -> bool:
        old = self._old.storages[s]
        return old.dtype == "float32" and old.born >= 0 and self._old.ops[old.born].phase == "backward"

    def _split(self, g: int, near: Op, half: bool) -> None:
        """From here on a storage lives in another precision; before, as what it was."""
        self._recast.add(g)
        life = self._lives[g]
        self._extra.append(_Life(replace(life.storage, kind="", name=""), life.half, life.born, len(self._ops)))
        life.half, life.born = half, len(self._ops)
        self._ops.append(self._cast_op(near, g))

    def _cast_back(self, number: int, op: Op) -> None:
        """When a node is done, gradients of what was cast for it go back to the precision of what they are gradients of."""
        assert op.forward is not None
        made = [
            s
            for n in range(self._first_of(number, op.forward), number + 1)
            for s in self._old.ops[n].outputs
            if self._old.storages[s].born == n and self._old.storages[s].dtype == "float32"
        ]
        for source, cast in self._of_op.get(op.forward, {}).items():
            size, weight = prod(self._old.storages[source].shape), self._old.storages[source].kind == "parameters"
            for g in sorted(set(made), key=lambda s: (self._old.storages[s].kind == "gradients") != weight):
                if prod(self._old.storages[g].shape) == size and self._lives[g].half == cast.life.half and g not in self._recast:
                    self._split(g, op, half=not cast.life.half)
                    break

    def _first_of(self, last: int, forward: int) -> int:
        while last and self._old.ops[last - 1].forward == forward:
            last -= 1
        return last

    # Lives

    def _draw_lives(self) -> None:
        keepers: dict[int, set[int]] = {}
        for saved in self._old.saved:
            keepers.setdefault(saved.storage, set()).add(saved.op)
        for s, life in enumerate(self._lives):
            life.died = self._death(s, keepers.get(s, set()))
        for cast in self._casts:
            cast.life.died = self._death_of_cast(cast, keepers.get(cast.source, set()))

    def _death(self, s: int, keepers: set[int]) -> int | None:
        died = self._old.storages[s].died
        if died is None:
            return None
        remaining = {f for f in keepers if self._read(f, s) is self._lives[s]}
        read_last = max((cast.life.born for cast in self._casts if cast.source == s), default=-1)
        if remaining != keepers or s in self._left:
            used = [n for n in self._readers.get(s, ()) if self._read(n, s) is self._lives[s]]
            done = [self._last_of.get(f, died) for f in remaining]
            died = min(died, max([*used, *done, self._old.storages[s].born]))
        return max(self._at[died], read_last)

    def _death_of_cast(self, cast: _Cast, keepers: set[int]) -> int | None:
        ends = [self._at[f] for f in cast.readers]
        if cast is self._left.get(cast.source):
            ends += [self._end_of_call(f) for f in cast.readers if self._inside[f] >= 0]  # a call holds its arguments until it returns
            old = self._old.storages[cast.source].died
            if old is None:
                return None
            if old > max((self._last_of.get(f, -1) for f in keepers), default=-1):  # somebody held it longer than autograd
                ends.append(self._at[old])
            keepers = {f for f in keepers if self._read(f, cast.source) is cast.life}
        elif len(cast.readers) and self._old.storages[cast.source].kind == "parameters" and cast.life.half:
            ends.append(self._end_of_call(cast.readers[-1]) if self._is_trained(self._old.storages[cast.source].name) else -1)
        ends += [self._at[self._last_of.get(f, f)] for f in cast.readers if f in keepers]
        return max(ends)

    def _end_of_call(self, number: int) -> int:
        call = self._inside[number]
        while number + 1 < len(self._inside) and self._inside[number + 1] == call:
            number += 1
        return self._at[number]

    # Together

    def _assembled(self) -> Trace:
        lives = [*self._lives, *(cast.life for cast in self._casts), *self._extra]
        storages = [self._drawn(life) for life in lives] + list(self._copies_of_buffers())
        last = len(self._at) - 1
        saved = [replace(s, op=self._at[s.op], read=None if s.read is None else self._at[min(s.read, last)]) for s in self._old.saved]
        calls = [replace(c, first=self._at[c.first], last=self._at[c.last]) for c in self._old.calls]
        ops = [replace(op, forward=None if op.forward is None else self._at[op.forward]) for op in self._ops]
        return replace(
            self._old, ops=tuple(ops), storages=tuple(storages), saved=tuple(saved), calls=tuple(calls), step_seconds=self._seconds(ops)
        )

    def _drawn(self, life: _Life) -> Storage:
        size, dtype = life.storage.bytes, life.storage.dtype
        if life.half:
            size, dtype = -(-size // 2), self._dtype
            size = -(-size // 512) * 512 if self._old.device == "cuda" else size
        return replace(life.storage, bytes=size, dtype=dtype, born=life.born, died=life.died)

    def _copies_of_buffers(self) -> Iterable[Storage]:
        """The guard keeps what buffers were, from a phase's first op to its optimizer."""
        buffers = [s for s in self._old.storages if s.born < 0 and s.kind == "other" and s.name and _may_change(s)]
        for loss in dict.fromkeys(op.loss for op in self._ops):
            span = [n for n, op in enumerate(self._ops) if op.loss == loss and op.phase != "optimizer"]
            if span:
                yield from (replace(s, born=span[0], died=span[-1], name="") for s in buffers)

    def _seconds(self, ops: Sequence[Op]) -> float | None:
        if self._old.step_seconds is None:
            return None
        return self._old.step_seconds + sum(op.seconds or 0.0 for op in ops) - sum(op.seconds or 0.0 for op in self._old.ops)


def _cut_to(storage: Storage, elements: int) -> Storage:
    return replace(storage, bytes=4 * elements, shape=(elements,)) if 0 < 4 * elements < storage.bytes else storage


def _may_change(storage: Storage) -> bool:
    return storage.dtype.startswith(("float", "bfloat")) or storage.shape == ()
