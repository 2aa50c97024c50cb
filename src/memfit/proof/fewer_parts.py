"""Levers that take a batch in parts, on fewer samples than they were planned for: the parts get smaller with the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.records import PlannedLever


def levers_for(rows: Sequence[PlannedLever], whole: int, samples: int) -> tuple[PlannedLever, ...]:
    """A plan's levers as they are compared on fewer samples; without those that would then have a single part, and nothing to show.

    >>> rows = [PlannedLever("microbatch", "4 of 4", "reordered", settings={"size": 4, "batch": 16})]
    >>> levers_for(rows, 16, 4)[0].settings["size"], levers_for(rows, 16, 1)
    (1, ())
    """
    return tuple(rows) if samples == whole else tuple(_smaller(rows, whole, samples))


def least_samples(rows: Sequence[PlannedLever], whole: int) -> int:
    """The fewest samples on which every lever of a plan can be compared.

    >>> least_samples([PlannedLever("chunk", "chunks of 8", "reordered", settings={"size": 8, "batch": 16})], 16)
    2
    """
    return next((samples for samples in range(1, whole) if len(levers_for(rows, whole, samples)) == len(rows)), whole)


def _smaller(rows: Sequence[PlannedLever], whole: int, samples: int) -> Iterator[PlannedLever]:
    def scaled(count: int) -> int:
        return max(1, count * samples // whole)

    for lever in rows:
        parts, seen = _parts_of(lever), _sees(lever, rows, whole)
        if not parts:
            yield lever
        elif parts["size"] >= seen or scaled(parts["size"]) < scaled(seen):
            yield _in_parts_of(scaled(parts["size"]), lever)


def _sees(lever: PlannedLever, rows: Sequence[PlannedLever], whole: int) -> int:
    """How many samples it divides: those of a micro-batch, where there are any."""
    outer = (row.settings["size"] for row in rows if row.name == "microbatch" and lever.name == "chunk")
    return next(outer, whole)


def _parts_of(lever: PlannedLever) -> Mapping[str, Any]:
    """The settings that hold the size of its parts, if it makes any: compile has micro-batches of its own."""
    if lever.name == "compile":
        return lever.settings.get("split") or {}
    return lever.settings if lever.name in ("microbatch", "chunk") else {}


def _in_parts_of(size: int, lever: PlannedLever) -> PlannedLever:
    parts = {**_parts_of(lever), "size": size}
    return replace(lever, settings={**lever.settings, "split": parts} if lever.name == "compile" else parts)
