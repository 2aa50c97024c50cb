"""torch's operators, by the names they have in a trace."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def operator_named(name: str) -> Any:
    """The operator; None for one of a library that is not loaded here.

    >>> operator_named("aten.relu.default") is torch.ops.aten.relu.default, operator_named("nowhere.relu.default")
    (True, None)
    """
    try:
        return functools.reduce(getattr, name.split("."), torch.ops)
    except (AttributeError, RuntimeError):
        return None


def writes(name: str) -> bool:
    """Whether an operator writes into a tensor it is given.

    >>> writes("aten.relu_.default"), writes("aten.div.out"), writes("aten.relu.default")
    (True, True, False)
    """
    operator = operator_named(name)
    return operator is not None and bool(operator._schema.is_mutable)
