"""The largest batch that a budget holds: as a step is, as people fix it by hand, and with memfit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from memfit import Step
from memfit.capture.simulation import built_without_memory
from memfit.largest_batch import LargestBatch, largest_batch
from memfit.levers import LEVERS, Lever
from memfit.units import parse_bytes
from recipes.kit.tables import write_table

Forms = Mapping[str, Callable[[], Step]]
EXACT, WITHOUT_PARTS, ROUNDED = "memfit, exact", "memfit, exact, without micro-batches", "memfit, rounding allowed"


def largest_by_way(budget: str, forms: Forms, device: str, rounding: bool = False) -> dict[str, str]:
    """Predicted by simulation, for every form and for memfit. The first form is the original, the one that memfit is asked about."""

    def asked(name: str, make: Callable[[], Step], levers: Mapping[str, Lever], allow: str = "reordered") -> LargestBatch:
        print(f"the largest batch in {budget}: {name}", flush=True)
        step = built_without_memory(make)
        return largest_batch(step, parse_bytes(budget), allow=allow, device=device, levers=levers, progress=print)

    (original, make), *by_hand = forms.items()
    found = asked(original, make, LEVERS)
    cells = {original: str(found.plain)}
    cells |= {name: _words(it.plain, it) for name, it in ((name, asked(name, made, {})) for name, made in by_hand)}
    cells |= {WITHOUT_PARTS: str(found.without_microbatch), EXACT: _words(found.with_microbatch, found)}
    if rounding:  # more is allowed, so where exact levers reach the end of what is tried, these do
        full = found.with_microbatch == found.tried_up_to
        loose = found if full else asked(ROUNDED, make, LEVERS, "rounded")
        cells[ROUNDED] = _words(max(loose.with_microbatch, found.with_microbatch), found)
    return cells


def write_largest(readme: Path, budget: str, forms: Forms, device: str) -> None:
    """The table "largest"."""
    rows = [[name, cell] for name, cell in largest_by_way(budget, forms, device).items()]
    write_table(readme, "largest", ["", f"largest batch in {budget}, predicted for {device.upper()}"], rows)


def _words(batch: int, found: LargestBatch) -> str:
    return f"{batch} or more" if batch == found.tried_up_to else str(batch)
