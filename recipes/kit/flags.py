"""Kinds of numbers on a recipe's command line: a wrong one is one message and exit code 2, as argparse does it."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1 up.

    >>> count("3")
    3
    """
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """A whole number from 0 up.

    >>> count_or_none("0")
    0
    """
    return _whole(text, 0)


def positive(text: str) -> float:
    """A finite number above 0, as a learning rate is.

    >>> positive("1e-4")
    0.0001
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")
    return int(text)
