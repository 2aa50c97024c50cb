"""Numbers of autograd's nodes, which tie a backward op to the forward op it belongs to.

torch has no public call for them, so both are looked up once; without them backward ops stay without module and line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_NONE = -1


def _no_number() -> int:
    return _NONE


def _next_number() -> Callable[[], int]:
    count: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
    return (lambda: count() - 1) if count else _no_number


def _running_number() -> Callable[[], int]:
    running = getattr(torch._C, "_current_autograd_node", None)
    if running is None:
        return _no_number

    def number() -> int:
        node = running()
        return _NONE if node is None else int(node._sequence_nr())

    return number


node_number_of_next_op = _next_number()
"""The number of the node that autograd made for the op that runs now (it makes the node first)."""

current_node_number = _running_number()
"""The number of the node whose backward runs now, or -1."""
