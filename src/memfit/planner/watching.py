"""What the mechanism itself costs: Python around autograd's saved tensors, and around the operators of watched module calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from memfit.levers.saved.table import forward_ops, smallest_calls
from memfit.records import Trace

SECONDS_OF_A_DECISION = 3.5e-5  # to write down how a result is made, and to make it again: beside the operator's own time
SECONDS_OF_A_LOOK = 1.4e-5  # at each operator of a watched call
_SECONDS_OF_A_HOOK = 5e-6  # for each tensor that autograd saves


class Watching:
    """For one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.hooks = len(trace.saved) * _SECONDS_OF_A_HOOK

    def seconds(self, decided: Iterable[int]) -> float:
        """With decisions about the results of some ops; none: nothing is installed."""
        watched = np.zeros(len(self.trace.ops), dtype=np.bool_)
        for first, last in {self._smallest_call[op] for op in decided}:
            watched[first : last + 1] = True
        count = int(np.count_nonzero(watched))
        return self.hooks + count * SECONDS_OF_A_LOOK if count else 0.0

    @cached_property
    def _smallest_call(self) -> dict[int, tuple[int, int]]:
        """For each op of a forward pass the module call that is watched if it is decided about; outside of all, the whole phase."""
        found: dict[int, tuple[int, int]] = {}
        for phase in dict.fromkeys(op.loss for op in self.trace.ops if op.phase == "forward"):
            if mine := forward_ops(self.trace, phase):
                found |= dict.fromkeys(mine, (mine[0], mine[-1]))
                found |= {op: (first, last) for op, (_, first, last) in smallest_calls(self.trace, mine).items()}
        return found
