"""The other place where results may wait until backward needs them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from memfit.levers.saved.table import DISK, HOST


@dataclass(frozen=True)
class Away:
    """Its word in a table, "" where there is none, and the bytes that may be there at a time."""

    word: str = ""
    room: float = inf


def away_from(device: str, room: float = inf) -> Away:
    """From a CPU's memory to a file, from a CUDA device to its host; memory that a device shares with its host has no other place.

    >>> away_from("cpu").word, away_from("cuda", 2**30).word, away_from("mps").word
    ('disk', 'host', '')
    """
    return {"cpu": Away(DISK), "cuda": Away(HOST, room)}.get(device, Away())
