"""A step's ops drawn again under autocast: casts put in, and the precision of everything made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from memfit.levers.precision_kernels import in_half
from memfit.levers.precision_ops import (
    FIRST_OUTPUT_ONLY,
    JOINED,
    KEPT_ON_CPU,
    KEPT_ON_CUDA,
    LOWERED,
    adds_bias_of_linear,
    as_cast,
    is_cross_entropy,
    outermost_calls,
    word,
    written_out_attention,
)
from memfit.records import Op, Storage, Trace


@dataclass
class Life:
    """A storage of the new trace while it is drawn; `died` counts new ops."""

    storage: Storage
    half: bool
    born: int
    died: int | None


@dataclass
class Cast:
    """A copy in another precision that autocast makes of a storage for an op."""

    source: int
    life: Life
    readers: list[int] = field(default_factory=list)  # ops, by their old numbers


class Drawing:
    """One pass over the old ops. Old storages keep their numbers; casts come behind them."""

    def __init__(self, trace: Trace, dtype: str) -> None:
        self.old, self.dtype = trace, dtype
        self._kept = KEPT_ON_CUDA if trace.device == "cuda" else KEPT_ON_CPU
        self.inside = outermost_calls(trace)
        self.lives = [Life(s, False, s.born, None) for s in trace.storages]
        self.casts: list[Cast] = []
        self._of_op: dict[int, dict[int, Cast]] = {}  # forward op, old storage: what it reads instead
        self._cached: dict[int, Cast] = {}
        self.left: dict[int, Cast] = {}  # storages that left their outermost module, in float32
        self.ops: list[Op] = []
        self.at: list[int] = []  # new number of each old op
        self.extra: list[Life] = []
        self.last_of = {op.forward: n for n, op in enumerate(trace.ops) if op.forward is not None}
        self.readers: dict[int, list[int]] = {}
        for number, op in enumerate(trace.ops):
            if op.phase == "forward":
                for s in set(op.inputs):
                    self.readers.setdefault(s, []).append(number)
        self._frozen = {n for m in trace.models for n in m.frozen}
        self._of_branch: dict[int, dict[int, Cast]] = {}  # forward op: gradients cast for its backward
        self._recast: set[int] = set()  # gradients that have gone to another precision
        self._written_out = written_out_attention(trace)
        self._ends = {max(ops) for ops in self._written_out}
        self._full = {number for ops in self._written_out for number in ops}

    def draw(self) -> Drawing:
        """Every op, one after the other."""
        for number, op in enumerate(self.old.ops):
            if op.phase == "forward":
                self._forward(number, op)
            elif op.phase == "backward":
                self._backward(number, op)
            else:
                self._put(number, op, half=False)
        return self

    # Forward

    def _forward(self, number: int, op: Op) -> None:
        call = self.inside[number]
        if number and self.inside[number - 1] != call:
            self._cached.clear()
        lowered = call >= 0 and number not in self._full and (word(op) in LOWERED or adds_bias_of_linear(self.old, number))
        if lowered:
            self._cast_inputs(number, op, to_half=True)
        elif call >= 0 and self._is_kept(number, op):
            self._cast_inputs(number, op, to_half=False)
        self._put(number, op, lowered or self._is_half(number, op))
        if call >= 0 and number in self._ends:
            self._split(op.outputs[0], op, half=True)
        if call >= 0 and (number + 1 == len(self.inside) or self.inside[number + 1] != call):
            self._leave(call, number)

    def _is_kept(self, number: int, op: Op) -> bool:
        joins_both = word(op) in JOINED and not self._is_half(number, op)
        return number in self._full or word(op) in self._kept or joins_both or is_cross_entropy(self.old, number)

    def _cast_inputs(self, number: int, op: Op, to_half: bool) -> None:
        for s in dict.fromkeys(as_cast(op)):
            life = self.read(number, s)
            if life.storage.dtype != "float32" or life.half == to_half:
                continue
            cast = self._cached.get(s) or self._new_cast(s, life, to_half, op)
            if number in self._full:
                cast.life.storage = _cut_to(cast.life.storage, self._elements_of_key(number))
            if to_half and life.storage.kind == "parameters" and self.is_trained(life.storage.name):
                self._cached[s] = cast
            cast.readers.append(number)
            self._of_op.setdefault(number, {})[s] = cast

    def _elements_of_key(self, number: int) -> int:
        """Queries, keys and values may share one storage; what is cast is one of them, and the scaled keys tell its size."""
        ops = next(ops for ops in self._written_out if number in ops)
        scaled = [self.old.ops[n] for n in sorted(ops) if word(self.old.ops[n]) == "mul"]
        return prod(self.old.storages[scaled[min(1, len(scaled) - 1)].outputs[0]].shape) if scaled else 0

    def is_trained(self, name: str) -> bool:
        """Whether a parameter is none of a frozen module's: autocast keeps the casts of trained ones for the whole call."""
        parts = name.split(".")
        return not any(".".join(parts[:n]) in self._frozen for n in range(len(parts) + 1))

    def _new_cast(self, s: int, life: Life, to_half: bool, near: Op) -> Cast:
        cast = Cast(s, Life(replace(life.storage, kind="", name=""), to_half, len(self.ops), None))
        self.casts.append(cast)
        self.ops.append(self._cast_op(near, s))
        return cast

    def _cast_op(self, near: Op, s: int) -> Op:
        return Op("aten._to_copy.default", near.phase, near.loss, near.module, near.source, (s,), (), forward=near.forward)

    def _leave(self, call: int, number: int) -> None:
        """The module hands out float32: copies of what is read beyond its call."""
        made = {s for n in range(call, number + 1) for s in self.old.ops[n].outputs if self.lives[s].half}
        for s in sorted(made):
            beyond = [n for n in self.readers.get(s, ()) if n > number]
            if beyond and s not in self.left:
                self.left[s] = self._new_cast(s, self.lives[s], False, self.old.ops[number])
                self.left[s].readers += beyond

    def read(self, number: int, s: int) -> Life:
        """What an op reads where it read an old storage: the storage itself, a cast for it, or the copy that left a module."""
        if cast := self._of_op.get(number, {}).get(s):
            return cast.life
        if cast := self._of_branch.get(number, {}).get(s):
            return cast.life
        if s in self.left and number in self.left[s].readers:
            return self.left[s].life
        return self.lives[s]

    def _is_half(self, number: int, op: Op, reading: int | None = None) -> bool:
        """What torch's promotion makes of an op's inputs; one number among tensors does not count."""
        reading = number if reading is None else reading
        lives = [self.read(reading, s) for s in op.inputs]
        floats = [life for life in lives if life.storage.dtype == "float32"]
        counted = [life for life in floats if prod(life.storage.shape) > 1] or floats
        if word(op).startswith(FIRST_OUTPUT_ONLY):
            counted = counted[:1]
        return bool(counted) and all(life.half for life in counted)

    def _put(self, number: int, op: Op, half: bool) -> None:
        """The op itself, and the precision of what it makes."""
        new = [s for s in dict.fromkeys(op.outputs) if self.old.storages[s].born == number and self.old.storages[s].dtype == "float32"]
        for s in new[:1] if word(op).startswith(FIRST_OUTPUT_ONLY) else new:
            self.lives[s].half = half
        for s in op.outputs:
            if self.old.storages[s].born == number:
                self.lives[s].born = len(self.ops)
        self.at.append(len(self.ops))
        touched = half and word(op) != "_to_copy"
        self.ops.append(in_half(self.old, op, self.dtype) if touched else op)

    # Backward

    def _backward(self, number: int, op: Op) -> None:
        reading = number if op.forward is None else op.forward
        self._enter_modules(number, op)
        self._enter_branch(number, op)
        self._put(number, op, self._is_half(number, op, reading))
        if op.forward is not None and self.last_of[op.forward] == number:
            self._cast_back(number, op)

    def _enter_modules(self, number: int, op: Op) -> None:
        """A gradient that comes from outside of a module is cast to what the module handed out."""
        if op.forward is None or self.inside[op.forward] < 0:
            return
        if op.forward in self._ends:
            for g in [g for g in dict.fromkeys(op.inputs) if self._is_gradient(g) and self.lives[g].half and g not in self._recast]:
                self._split(g, op, half=False)
        call = self.inside[op.forward]
        sizes = {prod(self.old.storages[s].shape) for s in self.left if self.inside[self.old.storages[s].born] == call}
        for g in filter(self._is_gradient, dict.fromkeys(op.inputs)):
            maker = self.old.ops[self.old.storages[g].born].forward
            from_outside = maker is None or self.inside[maker] != call
            if from_outside and not self.lives[g].half and prod(self.old.storages[g].shape) in sizes:
                self._split(g, op, half=True)

    def _enter_branch(self, number: int, op: Op) -> None:
        """The gradient of a sum is float32 if one of its sides was; the half-precision side gets a copy in its own."""
        if op.forward is None:
            return
        made = [s for s in self.old.ops[op.forward].outputs if self.old.storages[s].born == op.forward]
        sizes = {prod(self.old.storages[s].shape) for s in made if self.lives[s].half and s not in self.left}
        for g in filter(self._is_gradient, dict.fromkeys(op.inputs)):
            if self.read(op.forward, g).half or prod(self.old.storages[g].shape) not in sizes:
                continue
            cast = self._new_cast(g, self.lives[g], True, op)
            cast.readers += [n for n in range(number, self.last_of[op.forward] + 1) if g in self.old.ops[n].inputs]
            self._of_branch.setdefault(op.forward, {})[g] = cast

    def _is_gradient(self, s: int) -> bool:
        old = self.old.storages[s]
        return old.dtype == "float32" and old.born >= 0 and self.old.ops[old.born].phase == "backward"

    def _split(self, g: int, near: Op, half: bool) -> None:
        """From here on a storage lives in another precision; before, as what it was."""
        self._recast.add(g)
        life = self.lives[g]
        self.extra.append(Life(replace(life.storage, kind="", name=""), life.half, life.born, len(self.ops)))
        life.half, life.born = half, len(self.ops)
        self.ops.append(self._cast_op(near, g))

    def _cast_back(self, number: int, op: Op) -> None:
        """When a node is done, gradients of what was cast for it go back to the precision of what they are gradients of."""
        assert op.forward is not None
        made = [
            s
            for n in range(self._first_of(number, op.forward), number + 1)
            for s in self.old.ops[n].outputs
            if self.old.storages[s].born == n and self.old.storages[s].dtype == "float32"
        ]
        for source, cast in reversed(self._of_op.get(op.forward, {}).items()):  # autograd goes from the last cast to the first
            size, weight = prod(self.old.storages[source].shape), self.old.storages[source].kind == "parameters"
            for g in sorted(set(made), key=lambda s: (self.old.storages[s].kind == "gradients") != weight):
                if prod(self.old.storages[g].shape) == size and self.lives[g].half == cast.life.half and g not in self._recast:
                    self._split(g, op, half=not cast.life.half)
                    break

    def _first_of(self, last: int, forward: int) -> int:
        while last and self.old.ops[last - 1].forward == forward:
            last -= 1
        return last


def _cut_to(storage: Storage, elements: int) -> Storage:
    return replace(storage, bytes=4 * elements, shape=(elements,)) if 0 < 4 * elements < storage.bytes else storage
