"""What a call takes inside, told by calls like it that are small enough to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.capture.workspaces.calls import Call
from memfit.capture.workspaces.measured import Taken
from memfit.capture.workspaces.shrinking import smaller_calls
from memfit.ops.convolutions import blocked_bytes

Points = Sequence[tuple[Call, Taken]]

LIMITS = tuple(n * 2**20 for n in (12, 32, 96))
"""Of a call's arguments and outputs. A larger one is not run at its size: two smaller ones are, and their line is extended; the next limit
is for calls whose line may bend."""

_LINE_ERROR = 0.02  # of a workspace that was extended from smaller calls; most are exact
_MATTERS = 0.005  # of a call's arguments and outputs: what a bend may add before it is looked for
_STRAIGHT = 0.01  # how near a larger call is to the line of smaller ones that it confirms
_HUNGRIEST = 2.0  # times its arguments: more than a convolution's backward was not seen to take
_A_PAGE = 4096
_IN_PASSES = torch.ops.aten.convolution_backward.default
"""One pass for each gradient, and the hungrier one counts. Which that is can change with the size: without AVX-512, oneDNN's buffers for
the weights' gradient are of one size, and a copy of the input, for the other pass, outgrows them. The line then bends upwards."""


@dataclass(frozen=True)
class Extended:
    """A workspace as far as it is known."""

    inside: float
    unsure: float
    kept: float
    points: Points = ()
    may_bend: bool = False  # and it would matter

    def figures(self) -> list[float]:
        """Bytes inside, by how much they may be off, bytes kept."""
        return [self.inside, self.unsure, self.kept]


def trials_of(call: Call, outputs: int, limit: int) -> list[Call]:
    """What to run in order to know a call's workspace: the call itself, or two smaller ones."""
    total = call.nbytes + outputs
    if total <= limit:
        return [call]
    for most in (limit, LIMITS[-1]):  # a large volume's thinnest slab may be above the first
        if smaller := smaller_calls(call, most * call.nbytes // total):
            return smaller
    return [call] if total <= LIMITS[-1] else []


def extended(call: Call, points: Points, outputs: int, before: Points = ()) -> Extended:
    """What a call takes, on the line through smaller calls; `before`: still smaller ones."""
    nbytes = call.operand_bytes
    if not points:  # it would not run on zeros
        return Extended(0.0, _HUNGRIEST * call.nbytes, 0.0)
    (small, little), (large, much) = points[0], points[-1]
    if large.operand_bytes == nbytes:
        return Extended(float(much.inside), 0.0, float(much.kept))
    if large.operand_bytes == small.operand_bytes:
        return Extended(much.inside * nbytes / large.operand_bytes, float(nbytes), much.kept * nbytes / large.operand_bytes)
    inside, kept = _on_line(points, nbytes), much.kept + (much.kept - little.kept) * _along(points, nbytes)
    if call.func is not _IN_PASSES or _is_straight(points, before):
        return Extended(inside, _LINE_ERROR * inside, kept, points)
    made_last = _of_weights(large, much)
    if (copied := _copy_seen(call, large, much.inside + made_last)) and much.inside > little.inside:
        return Extended(copied - made_last, _LINE_ERROR * copied, kept, points)
    most = (much.inside + made_last) * _grows(call) / _grows(large) - made_last  # if all of it grew with the call
    hidden = min(most, _HUNGRIEST * nbytes) - inside
    return Extended(inside, max(_LINE_ERROR * inside, hidden), kept, points, hidden > _MATTERS * (nbytes + outputs))


def _along(points: Points, nbytes: int) -> float:
    """How far beyond the larger of two calls, in steps from the smaller to it."""
    return (nbytes - points[-1][0].operand_bytes) / (points[-1][0].operand_bytes - points[0][0].operand_bytes)


def _on_line(points: Points, nbytes: int) -> float:
    much = points[-1][1].inside
    return max(0.0, much + (much - points[0][1].inside) * _along(points, nbytes))


def _grows(call: Call) -> int:
    """Bytes of the arguments of a convolution's backward that differ between it and a smaller one: not the weights."""
    return sum(shape.nbytes for shape in call.args[:2])


def _of_weights(call: Call, taken: Taken) -> int:
    """Bytes of the gradients that do not grow with a call. They are made last, when what is taken inside is at its highest already."""
    of_input = call.args[1].nbytes
    return taken.kept - of_input if taken.kept >= of_input else taken.kept


def _copy_seen(call: Call, smaller: Call, taken: int) -> int:
    """Where a smaller call took just a copy of its input or of its gradient: the bytes of this call's; else 0."""
    for shape, small in zip(call.args[:2], smaller.args[:2], strict=True):
        if abs(blocked_bytes(small.size, small.dtype.itemsize) - taken) <= _A_PAGE:
            return blocked_bytes(shape.size, shape.dtype.itemsize)
    return 0


def _is_straight(points: Points, before: Points) -> bool:
    """Whether larger calls lie on the line of smaller ones, and it rises: what stays the same may hide what grows."""
    if len(before) < 2 or before[-1][0].operand_bytes >= points[-1][0].operand_bytes:
        return False
    nbytes, much = points[-1][0].operand_bytes, points[-1][1].inside
    rises = much - points[0][1].inside > _STRAIGHT * much
    return rises and abs(_on_line(before, nbytes) - much) <= _STRAIGHT * much
