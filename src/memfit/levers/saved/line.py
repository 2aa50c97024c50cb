"""A trace, read for what the saved lever needs: who made, wrote, read and kept each storage, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memfit.levers.saved.table import is_in_place
from memfit.records import Saved, Trace

SMALL_BESIDE = 16  # an output so many times smaller than the op's largest is kept: means and deviations of a norm
_DRAWS = ("bernoulli", "rand", "normal", "uniform_", "native_dropout", "exponential_", "multinomial", "rrelu", "_fused_dropout")
_FOR_AUTOGRAD_ONLY = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")  # run again without it, they give no workspace for their gradient
_NO_VALUES_NEEDED = "aten.empty_like.default"


@dataclass(frozen=True)
class Line:
    """Everything by number: ops on the step's line, storages, rows of trace.saved."""

    trace: Trace
    made: dict[int, list[int]]  # op: the storages it made that can be made again
    writers: dict[int, list[int]]  # storage: the op that made it and those that wrote to it in place, in order
    needs: list[tuple[int, ...]]  # op: the storages it must have to run again
    kept: dict[int, list[int]]  # storage: its rows in trace.saved
    once: frozenset[int]  # ops that never run again, as those that draw random numbers: their result is packed where that is possible
    ends: list[int]  # row of trace.saved: the last op of the gradient that reads it
    passing: dict[int, int]  # storage: the last op that would see it if autograd kept nothing
    turns: list[int]  # op: the first one at or after it that is not of a forward pass


def line_of(trace: Trace) -> Line:
    """Read a trace once, so that many tables can be tried on it."""
    made: dict[int, list[int]] = defaultdict(list)
    by_kernels = {s for op in trace.ops if op.parts for s in op.outputs}  # piece by piece, where no table looks
    for number, storage in enumerate(trace.storages):
        born = storage.born
        if number in by_kernels or born < 0 or trace.ops[born].phase != "forward":
            continue
        if number in trace.ops[born].outputs:  # not what a rewrite put beside
            made[born].append(number)
    for maker, numbers in made.items():
        largest = max(trace.storages[s].bytes for s in numbers)
        made[maker] = [s for s in numbers if trace.storages[s].bytes * SMALL_BESIDE >= largest]
    writers = {s: [maker] for maker, numbers in made.items() for s in numbers}
    for number, op in enumerate(trace.ops):
        if op.phase == "forward" and is_in_place(op.name):
            for s in op.outputs:
                if s in writers and writers[s][-1] != number:
                    writers[s].append(number)
    kept: dict[int, list[int]] = defaultdict(list)
    for row, saved in enumerate(trace.saved):
        kept[saved.storage].append(row)
    needs = [() if op.name == _NO_VALUES_NEEDED else tuple(dict.fromkeys(op.inputs)) for op in trace.ops]
    ends = _ends(trace)
    once = frozenset(s[0] for s in writers.values() if any(_runs_once(trace.ops[writer].name) for writer in s))
    return Line(trace, dict(made), writers, needs, dict(kept), once, ends, _passing(trace, writers, kept, ends), _turns(trace))


def _runs_once(name: str) -> bool:
    return name.split(".")[1].startswith(_DRAWS) or is_for_autograd_only(name)


def is_for_autograd_only(name: str) -> bool:
    """Whether an operator gives something else where no gradient is asked for, as it is when results are made again.

    >>> is_for_autograd_only("aten.mkldnn_rnn_layer.default"), is_for_autograd_only("aten.mm.default")
    (True, False)
    """
    return name.split(".")[1] in _FOR_AUTOGRAD_ONLY


def _ends(trace: Trace) -> list[int]:
    last: dict[int, int] = {}
    for number, op in enumerate(trace.ops):
        if op.phase == "backward" and op.forward is not None:
            last[op.forward] = number
    return [_end(saved, last) for saved in trace.saved]


def _end(saved: Saved, last: dict[int, int]) -> int:
    return -1 if saved.read is None else max(saved.read, last.get(saved.op, saved.read))


def _turns(trace: Trace) -> list[int]:
    turns = [len(trace.ops)]
    for number in reversed(range(len(trace.ops))):
        turns.append(turns[-1] if trace.ops[number].phase == "forward" else number)
    return turns[:0:-1]


def _passing(trace: Trace, makers: dict[int, list[int]], kept: dict[int, list[int]], ends: list[int]) -> dict[int, int]:
    """A caller holds what it handed to a module until the call returns, so a use inside counts until then."""
    last_use: dict[int, int] = {}
    for number, op in enumerate(trace.ops):
        if op.phase == "forward":
            last_use.update(dict.fromkeys((*op.inputs, *op.outputs), number))
    holds = sorted((call.first, call.last) for call in trace.calls)
    passing = {}
    for s in makers:
        born, last, died = trace.storages[s].born, last_use.get(s, trace.storages[s].born), _died(trace, s)
        if died > max((ends[row] for row in kept.get(s, ())), default=-1):
            passing[s] = died  # not autograd but the program holds it so long
        else:
            passing[s] = min(died, max((end for first, end in holds if born < first <= last <= end), default=last))
    return passing


def _died(trace: Trace, s: int) -> int:
    died = trace.storages[s].died
    return len(trace.ops) - 1 if died is None else died
