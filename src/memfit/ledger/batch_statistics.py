"""Normalisation over several samples at once."""

from __future__ import annotations

from memfit.ledger.findings.operators import word
from memfit.records import Op, Trace

_BATCH_NORMS = ("batch_norm", "batch_norm_legit", "batch_norm_with_update")


def takes_batch_statistics(trace: Trace, op: Op) -> bool:
    """Whether an op normalises with statistics of the samples it is given: a batch norm in training mode does.

    torch runs an instance norm as the batch norm of one sample that has every sample's channels: each has its own statistics.
    """
    if op.phase != "forward" or not word(op).endswith(_BATCH_NORMS) or len(op.outputs) < 3:
        return False
    normed, *statistics = (trace.storages[number] for number in op.outputs[:3])
    by_sample = normed.shape[0] == 1 and normed.shape[1] % trace.batch_size == 0
    return not by_sample and any(taken.bytes for taken in statistics)  # in eval mode none are taken
