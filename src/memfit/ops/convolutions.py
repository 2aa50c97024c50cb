"""What convolutions take inside on a CPU: oneDNN copies inputs and weights; with a single sample torch may take a kernel of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_SMALL = 20480  # elements in the first four dimensions of an input, up to which torch's own kernel is preferred
_BLOCK = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8  # channels that oneDNN keeps together
_COPIES_OF_WEIGHTS, _SMALL_BUFFERS = 5, 24 * 2**10  # more were not seen


def native_columns(
    sample: Sequence[int], weight: Sequence[int], output: Sequence[int], input_gradient: bool = False, weight_gradient: bool = False
) -> int | None:
    """Elements of the column buffer of torch's own convolution for one float32 sample; None where oneDNN is taken.

    Shapes with their batch dimension. Backward wants one of the gradients, forward none.

    >>> native_columns((1, 1, 8, 8, 8), (4, 1, 3, 3, 3), (1, 4, 8, 8, 8))
    13824
    >>> native_columns((1, 64, 96, 96), (64, 64, 3, 3), (1, 64, 96, 96)) is None
    True
    """
    plain = len(sample) == len(weight) == len(output) and sample[1] == weight[1] and output[1] == weight[0]  # no groups, not transposed
    if not plain or math.prod(sample[1:4]) > _SMALL or min(weight[-2:]) > 3:
        return None
    backward, flat, lone = input_gradient or weight_gradient, len(sample) == 4, math.prod(weight[2:]) == 1
    needed = input_gradient and not flat if lone else not backward or weight_gradient or not flat
    return math.prod(weight[1:]) * math.prod(output[2:]) if needed else 0


def fixed_part(workspace: int, sample: Sequence[int], weight: Sequence[int], output: Sequence[int], itemsize: int) -> int:
    """Of what oneDNN takes, the part that is copies of weights and does not shrink with the samples.

    It is what copies of the inputs and outputs leave over, if that is about the size of a few copies of the weights.

    >>> fixed_part(140288, (8, 16, 16, 16), (16, 16, 3, 3), (8, 16, 16, 16), 4)
    9216
    """
    given, made = (blocked_bytes(shape, itemsize) for shape in (sample, output))
    copies = [given + made - already * itemsize for already in (0, math.prod(sample), math.prod(output))]
    weights = _blocked(weight[0]) * _blocked(weight[1]) * math.prod(weight[2:]) * itemsize
    left = min((workspace - copied for copied in (*copies, given, made) if copied <= workspace), default=0)
    return left if left <= _COPIES_OF_WEIGHTS * weights + _SMALL_BUFFERS else 0


def blocked_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Of oneDNN's copy of an image, its batch dimension first."""
    return shape[0] * _blocked(shape[1]) * math.prod(shape[2:]) * itemsize


def _blocked(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK
