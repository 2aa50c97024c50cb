"""What rewrites have in common."""

from __future__ import annotations

from dataclasses import replace

from memfit.ledger import account
from memfit.ledger.timeline import live_bytes
from memfit.records import Ledger, Process, Trace


def rewritten(before: Ledger, trace: Trace) -> Ledger:
    """The ledger of a changed time line: a prediction, whose heap slack shrinks or grows with its peak. Causes are not looked for."""
    ratio = int(live_bytes(trace).max()) / before.peak_bytes
    return account(replace(trace, predicted=True, process=_with_slack(before, trace.process, ratio)), causes=False)


def _with_slack(before: Ledger, process: Process, ratio: float) -> Process:
    slack, low, high = process.slack_bytes, process.slack_low_bytes, process.slack_high_bytes
    if process.measured_bytes is not None:  # measured as a whole: what is neither known memory nor the base is slack
        slack = low = high = max(0, process.measured_bytes - process.base_bytes - process.workers_bytes - before.peak_bytes)
    return replace(
        process,
        slack_bytes=int(slack * ratio),
        slack_low_bytes=int(low * ratio),
        slack_high_bytes=int(high * ratio),
        measured_bytes=None,
        measured_peak_bytes=None,
    )
