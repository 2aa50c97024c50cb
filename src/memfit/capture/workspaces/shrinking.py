"""Smaller calls of the same kind, from which the workspace of a call too large to try can be extrapolated.

Along one dimension at a time: samples, the first spatial dimension of a convolution, an attention's positions, heads or channels where
an op treats each alike. Workspaces grow linearly along these, apart from a constant part (buffers per thread), so two smaller calls
tell the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.capture.workspaces.calls import Call, Shape

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension to shrink along: the full length, how to make the call with another one, and the least that is still alike."""

    full: int
    make: Callable[[int], Call | None]
    shortest: int = 1
    power: int = 1  # of the length that the work grows with


_MATRICES = {aten.mm.default: "mk kn", aten.addmm.default: "_ mk kn", aten.bmm.default: "bmk bkn", aten.baddbmm.default: "_ bmk bkn"}
_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_FEWEST_POSITIONS = 1024  # from 768 on, torch cuts an attention's positions into blocks of one size
_ONEDNN_FROM = 20_480  # a lone image goes to oneDNN when the product of its first four dimensions is larger


def smaller_calls(call: Call, limit: int) -> list[Call]:
    """Two calls of about `limit` bytes that are shorter along one dimension; none if there is no such way."""
    for axis in _axes(call):
        long = max(int(axis.full * limit / max(call.nbytes, 1)), axis.shortest + (axis.shortest + 1) // 2)
        long = long if axis.power == 1 else min(long, 2 * axis.shortest)  # more would be many times the work, and tell the same
        short = max(axis.shortest, long // 2)
        made = [axis.make(length) for length in (short, long)] if short < long < axis.full else []
        calls = [shrunk for shrunk in made if shrunk is not None and shrunk.nbytes < 4 * limit]
        if len(calls) == 2 and calls[0].nbytes < calls[1].nbytes:
            return calls
    return []


def shorter_call(call: Call, limit: int) -> tuple[Call, float] | None:
    """A call of about `limit` bytes that is shorter along one dimension, and how many times as much work the whole is."""
    for axis in _axes(call):
        length = max(int(axis.full * limit / max(call.nbytes, 1)), axis.shortest)
        made = axis.make(length) if length < axis.full else None
        if made is not None and made.nbytes < min(2 * limit, call.nbytes):
            of_lists = "_foreach_" in str(call.func) or "_fused_" in str(call.func)
            return made, call.nbytes / made.nbytes if of_lists else (axis.full / length) ** axis.power
    return None


def call_for_part(call: Call, batch: int, size: int) -> Call | None:
    """What a call on a whole batch would be on `size` of its samples, as far as its shapes tell; None where they do not."""
    letters = _MATRICES.get(call.func, "")
    if "b" in letters:
        heads = call.args[-1].size[0] if isinstance(call.args[-1], Shape) else 0
        return _with_letter(call, letters, "b", heads // batch * size) if heads and heads % batch == 0 else None
    whole = (axis for axis in _axes(call) if axis.full % batch == 0)
    return next((made for axis in whole if (made := axis.make(axis.full // batch * size)) is not None), None)


def _axes(call: Call) -> Iterator[Axis]:
    if call.func in (aten.convolution.default, aten.convolution_backward.default):
        yield from _convolution_axes(call)
    elif call.func in (aten.native_group_norm.default, aten.native_group_norm_backward.default):
        yield from _group_norm_axes(call)
    elif call.func in _MATRICES:
        yield from _matrix_axes(call, _MATRICES[call.func])
    elif "_foreach_" in str(call.func) or "_fused_" in str(call.func):
        yield from _list_axes(call)
    else:
        if call.func in _ATTENTION:
            yield from _position_axes(call)
        yield from _shared_axes(call)


def _convolution_axes(call: Call) -> Iterator[Axis]:
    backward = call.func is aten.convolution_backward.default
    first = 1 if backward else 0  # where the input stands among the arguments
    image: Shape = call.args[first]
    yield Axis(image.size[0], lambda n: call.with_args({i: call.args[i].resized(0, n) for i in range(first + 1)}), shortest=2)
    stride, transposed = call.args[first + 3], call.args[first + 6]

    def shortened(dim: int, length: int) -> Call | None:
        shorter, longer = (1, stride[dim - 2]) if transposed else (stride[dim - 2], 1)  # input and output shrink together
        steps = (image.size[dim] - length) // shorter
        changed = {first: image.resized(dim, image.size[dim] - steps * shorter)}
        if backward:
            changed[0] = call.args[0].resized(dim, call.args[0].size[dim] - steps * longer)
        return call.with_args(changed) if all(shape.size[dim] > 0 for shape in changed.values()) else None

    for dim in range(2, len(image.size)):
        yield Axis(image.size[dim], partial(shortened, dim), _least_alike(image, call.args[first + 1], dim))


def _least_alike(image: Shape, kernel: Shape, dim: int) -> int:
    """The shortest length at which torch still picks the same kernel as for the full one."""
    least, product = 2 * kernel.size[dim] + 2, math.prod(image.size[:4])
    if image.size[0] > 1 or product <= _ONEDNN_FROM or dim > 3:
        return least
    return max(least, _ONEDNN_FROM * image.size[dim] // product + 1)


def _group_norm_axes(call: Call) -> Iterator[Axis]:
    counts = 5 if call.func is aten.native_group_norm_backward.default else 3  # where N, C, HxW stand
    samples, _, area = call.args[counts : counts + 3]
    images = [i for i, arg in enumerate(call.args) if isinstance(arg, Shape) and len(arg.size) > 2]
    per_sample = [i for i, arg in enumerate(call.args) if isinstance(arg, Shape) and len(arg.size) > 1 and arg.size[0] == samples]
    yield Axis(samples, lambda n: call.with_args({i: call.args[i].resized(0, n) for i in per_sample} | {counts: n}))
    if images:
        depth = call.args[images[0]].size[2]
        yield Axis(depth, lambda n: call.with_args({i: call.args[i].resized(2, n) for i in images} | {counts + 2: area // depth * n}))


def _matrix_axes(call: Call, letters: str) -> Iterator[Axis]:
    lengths = {
        letter: shape.size[dim]
        for word, shape in zip(letters.split(), call.args, strict=False)
        for dim, letter in enumerate(word)
        if letter != "_"
    }
    for letter in sorted(lengths, key=lambda name: -lengths[name]):
        if not (letters.startswith("_") and letter == "n"):  # addmm's bias goes along n
            yield Axis(lengths[letter], partial(_with_letter, call, letters, letter))


def _with_letter(call: Call, letters: str, letter: str, length: int) -> Call:
    changed: dict[int, Any] = {}
    for position, word in enumerate(letters.split()):
        if letter in word:
            changed[position] = call.args[position].resized(word.index(letter), length)
    return call.with_args(changed)


def _list_axes(call: Call) -> Iterator[Axis]:
    """On a CPU, foreach ops go through their lists one by one: the largest member alone tells the workspace."""
    lists = [arg for arg in call.args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Shape)]
    if not lists or len(lists[0]) < 1:
        return
    largest = max(range(len(lists[0])), key=lambda i: lists[0][i].nbytes)
    alone = call.with_args(
        {i: [arg[largest]] for i, arg in enumerate(call.args) if isinstance(arg, (list, tuple)) and len(arg) == len(lists[0])}
    )
    rows = alone.args[0][0].size[0] if alone.args[0][0].size else 1
    yield Axis(rows, partial(_all_resized, alone, 0, rows))


def _position_axes(call: Call) -> Iterator[Axis]:
    """Before all others: along samples, heads or channels even a small call on many positions would take minutes."""
    lengths = [shape.size[2] for shape in call.args if isinstance(shape, Shape) and len(shape.size) == 4]
    same = len(set(lengths)) == 1  # of queries and keys
    for length in sorted(set(lengths), reverse=True):
        yield Axis(length, partial(_with_positions, call, length), _FEWEST_POSITIONS, 2 if same else 1)


def _with_positions(call: Call, length: int, shorter: int) -> Call:
    """Third in queries, keys, values, their gradients and the sums of exponentials; in a mask last as well."""

    def shortened(shape: Shape) -> Shape:
        for dim in range(2, len(shape.size)):
            shape = shape.resized(dim, shorter) if shape.size[dim] == length else shape
        return shape

    return call.with_shapes(shortened)


def _shared_axes(call: Call) -> Iterator[Axis]:
    """Dimensions that an unknown op most likely treats alike: the first two of its largest tensor, then from the back."""
    largest = max(call.shapes(), key=lambda shape: shape.nbytes, default=None)
    if largest is None:
        return
    rank = len(largest.size)
    for dim in (*range(min(rank, 2)), *range(-1, -rank - 1, -1)):
        yield Axis(largest.size[dim], partial(_all_resized, call, dim, largest.size[dim]))


def _all_resized(call: Call, dim: int, length: int, shorter: int) -> Call:
    """Every tensor that is as long in this dimension made shorter, and every size given in numbers as well."""
    rank = max(len(shape.size) for shape in call.shapes())

    def has(size: Sequence[Any]) -> bool:
        return -len(size) <= dim < len(size) and size[dim] == length

    def shares(shape: Shape) -> bool:
        # A norm's weight or statistics may by chance be as long as the batch; batch norm does not check and would write beyond them.
        of_channels = len(shape.size) == 1 < rank and shape.dtype.is_floating_point
        return has(shape.size) and not of_channels

    numbers = {
        i: [*arg[: dim % len(arg)], shorter, *arg[dim % len(arg) + 1 :]]
        for i, arg in enumerate(call.args)
        if isinstance(arg, (list, tuple)) and all(isinstance(n, int) for n in arg) and len(arg) > 2 and has(arg)
    }
    return call.with_args(numbers).with_shapes(lambda s: s.resized(dim % len(s.size), shorter) if shares(s) else s)
