"""Counts bytes: from a Trace to a Ledger. Pure, and needs no torch."""

from __future__ import annotations

import numpy as np

from memfit.errors import MemfitError
from memfit.ledger.findings import findings_in
from memfit.ledger.owners import by, by_category, most_by_module, owners_at
from memfit.ledger.timeline import live_bytes, reaching, stretches
from memfit.records import Ledger, Trace

__all__ = ["account"]

_ALWAYS_UNSURE = 0.005  # of the peak: small things nobody models, seen in the accuracy table


def account(trace: Trace, causes: bool = True) -> Ledger:
    """The ledger of a step; root causes and modules' own peaks take longest, and a planner that weighs many ledgers leaves them out."""
    if not trace.ops:
        raise MemfitError("The step ran no operator at all, so there is nothing to count: does its loss use the model?")
    if trace.process.measured_peak_bytes is not None:
        trace = reaching(trace, trace.process.measured_peak_bytes)
    live = live_bytes(trace)
    peak_op = int(live.argmax())
    peak = int(live[peak_op])
    errors = np.fromiter((op.workspace_error for op in trace.ops), np.int64, len(trace.ops))
    margin = int(_ALWAYS_UNSURE * peak) if trace.predicted else 0
    low, high = int((live - errors).max()) - margin, int((live + errors).max()) + margin
    owners = owners_at(trace, peak_op)
    process = trace.process
    expected = process.base_bytes + peak + process.workers_bytes
    seen = process.measured_bytes
    return Ledger(
        peak_bytes=peak,
        process_bytes=expected + process.slack_bytes if seen is None else seen,
        predicted=trace.predicted,
        low_bytes=low,
        high_bytes=high,
        process_low_bytes=expected - peak + low + process.slack_low_bytes if seen is None else seen,
        process_high_bytes=expected - peak + high + process.slack_high_bytes if seen is None else seen,
        step_seconds=trace.step_seconds,
        device=trace.device,
        batch_size=trace.batch_size,
        by_category=by_category(owners),
        by_module=by(owners, lambda owner: owner.module),
        by_op=by(owners, lambda owner: owner.op),
        by_source=by(owners, lambda owner: owner.source),
        at_peak=owners,
        findings=findings_in(trace, owners, peak_op) if causes else (),
        process=process,
        peak_op=peak_op,
        timeline=tuple(int(b) for b in live),
        stretches=stretches(trace),
        notes=trace.notes,
        trace=trace,
        growth_bytes=trace.growth_bytes,
        most_by_module=most_by_module(trace) if causes else {},
        conditions=trace.conditions,
    )
