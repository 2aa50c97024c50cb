"""Root causes in plain words: what fills memory, where, why, and which technique helps. Pure, and needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.ledger.findings.activations import batch_activations, frozen_activations
from memfit.ledger.findings.attention import attention_maps
from memfit.ledger.findings.cheap import cheap_activations
from memfit.ledger.findings.leak import leak
from memfit.ledger.findings.networks import optimizer_states, side_networks
from memfit.ledger.findings.outer_product import outer_products
from memfit.ledger.findings.precision import full_precision
from memfit.ledger.findings.process import allocator_slack, loader
from memfit.ledger.findings.scene import Scene
from memfit.ledger.findings.temporary import temporary_peak
from memfit.records import Finding, Owner, Trace

__all__ = ["findings_in"]

FINDERS: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    outer_products,
    attention_maps,
    frozen_activations,
    cheap_activations,
    batch_activations,
    full_precision,
    optimizer_states,
    side_networks,
    temporary_peak,
    loader,
    allocator_slack,
    leak,
)


def findings_in(trace: Trace, owners: tuple[Owner, ...], peak_op: int) -> tuple[Finding, ...]:
    """What memory is spent on that need not be, the largest first. Findings may speak of the same bytes from several sides."""
    scene = Scene(trace, owners, peak_op)
    return tuple(sorted((finding for finder in FINDERS for finding in finder(scene)), key=lambda finding: -finding.bytes))
