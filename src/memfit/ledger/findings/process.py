"""What the process holds beside the step's tensors: the loader's workers and what the allocator does not give back."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.words import counted, share
from memfit.records import Finding
from memfit.units import format_bytes

_LEAST_SHARE_OF_LOADER = 0.02
_LEAST_SHARE_OF_SLACK = 0.05


def loader(scene: Scene) -> Iterator[Finding]:
    """Worker processes and pinned batches."""
    process = scene.trace.process
    size = process.workers_bytes + process.pinned_bytes
    whole = process.measured_bytes or process.base_bytes + scene.peak + process.slack_bytes + process.workers_bytes
    if not size or size < _LEAST_SHARE_OF_LOADER * whole:
        return
    parts = []
    if process.workers_bytes:
        parts.append(f"{counted(process.workers, 'worker')} ({format_bytes(process.workers_bytes)})")
    if process.pinned_bytes:
        parts.append(f"pinned batches ({format_bytes(process.pinned_bytes)})")
    yield Finding(
        "loader",
        size,
        "the data loader",
        f"The data loader holds {' and '.join(parts)}, {share(size, whole)} of what the system counts for this process. "
        "Fewer workers, fewer batches fetched ahead or no pinning take less, as long as they keep the step fed.",
        "loader",
    )


def allocator_slack(scene: Scene) -> Iterator[Finding]:
    """Memory that the allocator holds and no tensor uses."""
    process, measured = scene.trace.process, scene.trace.process.measured_bytes
    if measured is None:
        size, how = process.slack_bytes, "is expected to hold"
    else:
        size, how = measured - process.base_bytes - process.workers_bytes - scene.peak, "was seen to hold"
    if size <= 0 or size < _LEAST_SHARE_OF_SLACK * scene.peak:
        return
    yield Finding(
        "allocator_slack",
        size,
        "the allocator",
        f"The allocator {how} {format_bytes(size)} beyond the tensors at the peak ({share(size, scene.peak)} of them): freed pieces "
        "that it keeps or that are too scattered to be given back.",
        "allocator",
    )
