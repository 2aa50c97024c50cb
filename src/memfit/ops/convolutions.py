"""Which kernel a convolution takes on a CPU, and what it takes inside: with a single sample torch may leave oneDNN for its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMALL = 20480  # elements in the first four dimensions of an input, up to which torch's own kernel is preferred


def native_columns(sample: Sequence[int], weight: Sequence[int], output: Sequence[int], backward: bool) -> int | None:
    """Elements of the column buffer of torch's own convolution for one float32 sample; None where oneDNN is taken.

    Shapes with their batch dimension. A kernel of one element needs no columns in the forward pass.

    >>> native_columns((1, 1, 8, 8, 8), (4, 1, 3, 3, 3), (1, 4, 8, 8, 8), backward=False)
    13824
    >>> native_columns((1, 64, 96, 96), (64, 64, 3, 3), (1, 64, 96, 96), backward=False) is None
    True
    """
    plain = len(sample) == len(weight) == len(output) and sample[1] == weight[1] and output[1] == weight[0]  # no groups, not transposed
    if not plain or math.prod(sample[1:4]) > _SMALL or min(weight[-2:]) > 3:
        return None
    if not backward and math.prod(weight[2:]) == 1:
        return 0
    return math.prod(weight[1:]) * math.prod(output[2:])
