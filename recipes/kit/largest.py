"""The largest batch that a budget holds: as a step is, as people fix it by hand, and with memfit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.fitting.largest_batch import LargestBatch, largest_batch
from memfit.levers import LEVERS, Lever
from memfit.units import parse_bytes
from recipes.kit.tables import write_table


def write_largest(readme: Path, budget: str, forms: Mapping[str, Callable[[], Step]], device: str) -> None:
    """The table "largest", predicted by simulation. The first form is the original, the one that memfit is asked about."""
    (original, make), *by_hand = forms.items()

    def asked(name: str, make: Callable[[], Step], levers: Mapping[str, Lever]) -> LargestBatch:
        print(f"the largest batch in {budget}: {name}", flush=True)
        return largest_batch(built_without_memory(make), parse_bytes(budget), device=device, levers=levers, progress=print)

    found = asked(original, make, LEVERS)
    more = " or more" if found.with_microbatch == found.tried_up_to else ""
    rows = [
        [original, str(found.plain)],
        *([name, str(asked(name, make, {}).plain)] for name, make in by_hand),
        ["memfit, exact, without micro-batches", str(found.without_microbatch)],
        ["memfit, exact", f"{found.with_microbatch}{more}"],
    ]
    write_table(readme, "largest", ["", f"largest batch in {budget}, predicted for {device.upper()}"], rows)
