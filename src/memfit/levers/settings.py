"""What the rows of a plan hold for their levers; a file that was edited or cut short is told before any lever acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.levers import allocator, architecture, attention, chunk, compile, loader, microbatch, optimizer, outer_product, precision, saved
from memfit.levers.reading import Damaged

_READERS = {
    module.__name__.rpartition(".")[2]: module.read_settings
    for module in (
        saved, microbatch, chunk, precision, attention, outer_product, optimizer, loader, allocator, compile, architecture,
    )
}  # fmt: skip


def damage_in(lever: str, settings: Mapping[str, Any]) -> str:
    """What a lever could not work with, in a few words; "" where nothing is wrong.

    >>> damage_in("microbatch", {}), damage_in("optimizer", {"how": 3}), damage_in("optimizer", {"how": "fused"})
    ("'size' is missing", "'how' is 3", '')
    """
    try:
        _READERS.get(lever, dict)(settings)
    except Damaged as damage:
        return str(damage)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its settings cannot be read ({type(error).__name__}: {error})"
    return ""
