"""Runs a step's parts on the random numbers that the whole batch would have drawn.

The first part draws every random op at the whole batch's shape and takes its slice; the others take theirs. A draw is known by the
state its generator was in, its shape and its dtype, so that a region which is recomputed, or a program that seeds again, meets its own
numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.ops.bits import packed_away, unpacked
from memfit.ops.draws import Drawn, NotReplayable, draws, kind_of_draw
from memfit.torch_private import TorchDispatchMode, default_mps_generator, simulating

aten = torch.ops.aten
_FILLED_BY = {"rand_like": aten.uniform_.default, "randn_like": aten.normal_.default}


@dataclass
class _Kept:
    """A draw of the whole batch, cut into the parts' pieces; masks are kept as bits."""

    pieces: list[torch.Tensor | None]
    shapes: list[tuple[int, ...]]
    masks: bool
    after: bytes | None  # the generator's state

    def piece(self, part: int) -> torch.Tensor:
        kept = self.pieces[part]
        assert kept is not None  # a part's pieces go when it is over
        return unpacked(kept, self.shapes[part]) if self.masks else kept


class Replay(TorchDispatchMode):
    """Entered for one part after the other, in `part(number)`; the parts have `lengths` samples, the draws were seen with `batch`."""

    def __init__(self, draws: Sequence[Drawn], batch: int, lengths: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._batch, self._lengths = draws, batch, lengths
        self._kept: dict[Any, list[_Kept]] = {}  # from the same state there may be draws of several shapes
        self._cursor = self._ordinal = 0
        self._part, self._first = 0, -1  # the first part that runs is the one that draws
        self._starts: dict[torch.Generator, bytes] = {}  # a program's own generators join at their first draw
        self._ends: dict[torch.Generator, bytes] = {}
        self.in_loss = False  # else in backward, which draws only where it recomputes

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """A part's turn: generators start as they did for the first, and end as they did for it."""
        self._part, self._ordinal = number, 0
        if self._first < 0:
            self._first, self._starts = number, _default_states()
        for generator, state in self._starts.items():
            _set_state(generator, state)
        try:
            yield
        finally:
            if number == self._first:
                self._ends = {generator: _state_of(generator) for generator in self._starts}
            for generator, state in self._ends.items():
                _set_state(generator, state)
            for kept in itertools.chain.from_iterable(self._kept.values()):
                kept.pieces[number] = None

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Around a part's loss."""
        self.in_loss = True
        try:
            yield
        finally:
            self.in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        kind = kind_of_draw(func)
        if kind == "other":
            raise NotReplayable(f"{func} draws by the values it is given, which a part of the batch has only its own of")
        fake = simulating()
        if fake and not self.in_loss:
            return func(*args, **kwargs)
        generator = None if fake else _generator_of(args, kwargs)
        key = (str(func), _settings(func, args), _dtype_of(args, kwargs), self._moment(generator))
        alike, shape = self._kept.setdefault(key, []), _shape_of(kind, func, args)
        kept = next((kept for kept in alike if kept.shapes[self._part] == shape), None)
        if kept is None:
            kept = self._draw(kind, func, args, kwargs, generator)
            alike.append(kept)
        elif generator is not None:
            assert kept.after is not None  # a real draw keeps it
            _set_state(generator, kept.after)
        return _given(kind, args, kept.piece(self._part))

    def _moment(self, generator: torch.Generator | None) -> Any:
        """What tells one draw from another: the generator's state; fake tensors leave it alone, there we count."""
        if generator is None:
            self._ordinal += 1
            return self._ordinal
        return hashlib.blake2b(_state_of(generator), digest_size=16).digest()

    def _draw(self, kind: str, func: Any, args: Any, kwargs: Any, generator: torch.Generator | None) -> _Kept:
        if self._part != self._first:
            raise NotReplayable(f"part {self._part + 1} calls {func} where the first part did not, or for another shape")
        if kind in ("mask", "fill") and args[0].numel() * args[0].element_size() < args[0].untyped_storage().nbytes():
            raise NotReplayable(f"{func} fills only a part of a tensor, and what it draws depends on how the rest lies in memory")
        whole, shape, dim = self._expected(func, _shape_of(kind, func, args))
        if generator is not None:
            self._starts.setdefault(generator, _state_of(generator))
        drawn = _draw_whole(kind, func, args, kwargs, whole, shape)
        pieces = [drawn] * len(self._lengths) if dim is None else list(drawn.split([self._rows(shape[dim], n) for n in self._lengths], dim))
        masks = drawn.dtype == torch.bool
        after = None if generator is None else _state_of(generator)
        shapes = [tuple(piece.shape) for piece in pieces]
        if masks:
            pieces = [packed_away(drawn)] * len(pieces) if dim is None else [packed_away(piece) for piece in pieces]
        return _Kept(list(pieces), shapes, masks, after)

    def _rows(self, length: int, samples: int) -> int:
        return length // sum(self._lengths) * samples

    def _expected(self, func: Any, shape: tuple[int, ...]) -> tuple[Drawn, tuple[int, ...], int | None]:
        """The whole batch's draw that this call is a part of: the next that fits, since a program may skip some."""
        for number in range(self._cursor, len(self._draws)):
            whole = self._draws[number]
            enlarged = whole.enlarged(shape, self._lengths[self._first], self._batch, sum(self._lengths)) if whole.op == str(func) else None
            if enlarged is not None:
                self._cursor = number + 1
                return whole, *enlarged
        raise NotReplayable(f"{func} of shape {shape} is no part of a draw that was seen with the whole batch")


def _shape_of(kind: str, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[_size_at(func)] if kind == "make" else args[0].shape)


def _size_at(func: Any) -> int:
    return [argument.name for argument in func._schema.arguments].index("size")


def _settings(func: Any, args: tuple[Any, ...]) -> str:
    return repr([arg for arg in args if not isinstance(arg, (torch.Tensor, list, tuple))])


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    return kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], torch.Tensor) else None)


def _generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    device = args[0].device if isinstance(args[0], torch.Tensor) else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    generator = default_mps_generator() if device.type == "mps" else torch.default_generator
    if generator is None:
        raise NotReplayable(f"torch {torch.__version__} does not let anyone see the state of the random numbers on MPS")
    return generator


def _state_of(generator: torch.Generator) -> bytes:
    """Read past torch, which would show it to every mode as a tensor of the step's, and count it as memory that no simulation sees."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _set_state(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _default_states() -> dict[torch.Generator, bytes]:
    """Before anything runs: a program may fork and seed one of them before it draws. Fake tensors leave them alone."""
    if simulating():
        return {}
    generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    if torch.backends.mps.is_available() and (on_mps := default_mps_generator()) is not None:
        generators.append(on_mps)
    return {generator: _state_of(generator) for generator in generators}


def _draw_whole(kind: str, func: Any, args: Any, kwargs: Any, whole: Drawn, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == "make":
        at = _size_at(func)
        made: torch.Tensor = func(*args[:at], list(shape), *args[at + 1 :], **kwargs)
        return made
    source: torch.Tensor = args[0]
    if kind == "dropout":
        mask: torch.Tensor = func(whole.room(shape, source.dtype, source.device).fill_(1), *args[1:], **kwargs)[1]
        return mask
    dtype = torch.bool if kind == "mask" else kwargs.get("dtype") or source.dtype
    room = whole.room(shape, dtype, source.device)
    if kind == "like":
        fill = _FILLED_BY.get(func._schema.name.removeprefix("aten::"))
        return fill(room) if fill else room.random_(*((0, *args[1:]) if len(args) == 2 else args[1:]))
    filled: torch.Tensor = func(room, *args[1:], **kwargs)
    return filled


def _given(kind: str, args: Any, piece: torch.Tensor) -> Any:
    """The part's piece in the form the call would have given it."""
    if kind == "make":
        return piece.clone()
    if kind == "like":
        return torch.empty_like(args[0], dtype=piece.dtype).copy_(piece)
    if kind == "dropout":
        rate = args[1]
        return args[0] * piece * (0.0 if rate == 1 else 1 / (1 - rate)), piece
    return args[0].copy_(piece)
