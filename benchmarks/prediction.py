"""What memfit predicts for a row of the zoo, in a fresh process and without touching memory for it: `python prediction.py ROW`.

The step is built and profiled as `memfit profile TARGET --simulate` does. Prints one JSON object. What malloc will hold depends on
its environment variables: predict under the ones the step will run under.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import memfit
from memfit.capture.simulation import built_without_memory
from zoo import make_step

_KEYS = ("peak_bytes", "low_bytes", "high_bytes", "process_bytes", "process_low_bytes", "process_high_bytes", "by_category", "notes")


def _main(row: str) -> None:
    started = time.perf_counter()
    step = built_without_memory(partial(make_step, row))
    built = time.perf_counter()
    ledger = memfit.profile(step, simulate=True)
    seconds = {"build_seconds": built - started, "profile_seconds": time.perf_counter() - built}
    assert ledger.trace is not None
    running = ledger.trace.ops[ledger.peak_op]
    at_peak = {"op": running.name, "module": running.module, "workspace": running.workspace, "workspace_error": running.workspace_error}
    print(json.dumps({"row": row} | seconds | {key: getattr(ledger, key) for key in _KEYS} | {"peak_op": at_peak}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
