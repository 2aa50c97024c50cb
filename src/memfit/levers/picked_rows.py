"""Batches whose samples belong together: the nodes of a graph, which its edges pick by their numbers."""

from __future__ import annotations

from memfit.ledger.findings.operators import word
from memfit.ledger.proportional import proportional_storages
from memfit.records import Op, Trace

_PICKS = ("index", "_unsafe_index", "index_select", "gather")


def picks_among_samples(trace: Trace) -> bool:
    """Whether numbers that belong to the whole batch pick among the rows of all samples: in a part they would mean other rows, or none.

    What is picked along another dimension still has one for the samples.
    """
    growing = proportional_storages(trace)
    whole = {number for number, s in enumerate(trace.storages) if s.kind == "batch" and number not in growing}
    for now, op in enumerate(trace.ops):
        if op.phase != "forward" or not whole.intersection(op.inputs):
            continue
        made = [number for number in op.outputs if trace.storages[number].born == now]
        if whole.issuperset(op.inputs):
            whole.update(made)
        elif _picks_rows(trace, op, made) and op.inputs[0] in growing:
            return True
    return False


def _picks_rows(trace: Trace, op: Op, made: list[int]) -> bool:
    return word(op) in _PICKS and all(trace.batch_size not in trace.storages[number].shape for number in made)
