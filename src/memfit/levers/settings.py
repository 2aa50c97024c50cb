"""What the rows of a plan hold for their levers; a file that was edited or cut short is told before any lever acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memfit.levers.drawn import drawn_from
from memfit.levers.saved.table import tables_of

_PARTS = {"size": int, "batch": int, "draws": dict, "again": bool}
_NEEDED: dict[str, dict[str, type]] = {
    "microbatch": _PARTS,
    "chunk": _PARTS,
    "attention": {"rows": int, "modules": list, "sdpa": list},
    "compile": {"modules": list},
    "optimizer": {"how": str},
    "precision": {"dtype": str},
    "architecture": {"variant": str},
}


def _read_draws(settings: Mapping[str, Any]) -> None:
    for told in settings["draws"].values():
        drawn_from(told)


def _read_split(settings: Mapping[str, Any]) -> None:
    if damage := damage_in("microbatch", settings["split"]) if "split" in settings else "":
        raise ValueError(f"of its micro-batches {damage}")


def _read_draws_of_calls(settings: Mapping[str, Any]) -> None:
    for calls in settings["draws"].values():
        for told in calls:
            drawn_from(told)


def _read_amounts(settings: Mapping[str, Any]) -> None:
    for name in ("holes", "threshold", "cache"):
        if name in settings and not (type(settings[name]) in (int, float) and settings[name] >= 0):
            raise ValueError(f"{name!r} is {settings[name]!r}")


_READERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "saved": tables_of,
    "microbatch": _read_draws,
    "chunk": _read_draws_of_calls,
    "compile": _read_split,
    "allocator": _read_amounts,
    "loader": _read_amounts,
}


def damage_in(lever: str, settings: Mapping[str, Any]) -> str:
    """What a lever could not work with, in a few words; "" where nothing is wrong.

    >>> damage_in("microbatch", {}), damage_in("optimizer", {"how": 3}), damage_in("optimizer", {"how": "fused"})
    ("'size' is missing", "'how' is 3", '')
    """
    for name, kind in _NEEDED.get(lever, {}).items():
        if name not in settings:
            return f"{name!r} is missing"
        if not isinstance(settings[name], kind) or (name in ("size", "batch") and settings[name] < 1):
            return f"{name!r} is {settings[name]!r}"
    try:
        _READERS.get(lever, bool)(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its settings cannot be read ({type(error).__name__}: {error})"
    return ""
