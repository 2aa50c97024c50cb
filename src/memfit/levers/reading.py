"""What a lever's settings in a plan's file may hold: each lever says it of its own, and damage is named."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[Mapping[str, Any]], object]  # of a lever's settings; raises Damaged, or whatever reading what is no settings raises
Check = Callable[[Any], bool]  # of one value


class Damaged(ValueError):
    """What a lever could not work with, in a few words."""


def reader(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Reader:
    """The reader of settings with these names, of which `more` need not be there.

    >>> read = reader({"size": at_least(1)}, {"again": is_bool})
    >>> read({"size": 2, "agian": True})
    Traceback (most recent call last):
    memfit.levers.reading.Damaged: 'agian' is not known
    """
    known = {**needed, **(more or {})}

    def read(settings: Mapping[str, Any]) -> None:
        for name in (*needed, *settings):
            if name not in known:
                raise Damaged(f"{name!r} is not known")
            if name not in settings:
                raise Damaged(f"{name!r} is missing")
            if not known[name](settings[name]):
                raise Damaged(f"{name!r} is {reprlib.repr(settings[name])}")

    return read


def at_least(least: int, most: float = float("inf")) -> Check:
    """A whole number; True is none."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def between(least: float, most: float = float("inf")) -> Check:
    """Any number."""
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def one_of(*words: str) -> Check:
    """One of these words."""
    return lambda value: isinstance(value, str) and value in words


def is_true(value: Any) -> bool:
    """A truth value that stands for itself."""
    return value is True


def is_bool(value: Any) -> bool:
    """A truth value."""
    return isinstance(value, bool)


def is_word(value: Any) -> bool:
    """A word."""
    return isinstance(value, str)


def are_words(value: Any) -> bool:
    """A list of words."""
    return are_each(is_word)(value)


def are_each(check: Check) -> Check:
    """A list of what passes."""
    return lambda value: isinstance(value, (list, tuple)) and all(map(check, value))


def by_loss(check: Check) -> Check:
    """What passes for each loss, by its name."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))
