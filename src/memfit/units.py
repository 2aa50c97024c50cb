"""The only place where bytes and seconds are parsed or printed."""

from __future__ import annotations

import math
import re

from memfit.errors import MemfitError

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MOST = 2**63  # beyond what any machine addresses
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes: an integer, or a number with a unit.

    >>> parse_bytes("6GiB"), parse_bytes("850 MB"), parse_bytes(4096)
    (6442450944, 850000000, 4096)
    """
    match = _NUMBER.fullmatch(str(text)) if isinstance(text, (str, int)) and not isinstance(text, bool) else None
    if match is None or match[2].upper() not in _FACTORS:
        raise MemfitError(_unreadable(text))
    found, unit = match[1], match[2].upper()
    amount = float(found) * _FACTORS[unit]
    if not 1 <= amount < _MOST:
        raise MemfitError(_unreadable(text))
    return int(amount) if unit or "." in found else int(found)


def _unreadable(text: object) -> str:
    return f"{text!r} is not an amount of memory above zero: write a number and a unit, as in 6GiB, 850MB or 1.5GiB."


def format_bytes(count: int, up: bool = False) -> str:
    """Print bytes in binary units with three significant digits; `up`: as an amount that is enough, read again.

    >>> format_bytes(1536), format_bytes(0), format_bytes(50 * 2**30), format_bytes(-300 * 2**20)
    ('1.50 KiB', '0 B', '50.0 GiB', '-300 MiB')
    >>> format_bytes(2**20 + 1), format_bytes(2**20 + 1, up=True)
    ('1.00 MiB', '1.01 MiB')
    """
    if abs(count) < 1024:
        return f"{count} B"
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1023.5 and len(units) > 1:
        size /= 1024
        del units[0]
    decimals = max(0, 2 - int(math.log10(abs(size) * 1.0005)))
    shown = math.ceil(size * 10**decimals) / 10**decimals if up else size
    return f"{shown:.{decimals}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Print a duration.

    >>> format_seconds(0.0421), format_seconds(3.9), format_seconds(250)
    ('42 ms', '3.9 s', '4 min 10 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
