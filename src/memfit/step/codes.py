"""What a function says: a digest of its compiled code and of the functions of its own file that it calls, the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"  # another one compiles the same words to another code


def code_fact(call: Callable[..., Any]) -> str:
    """A function's name and the digest of its code; of a callable object, those of its class.

    >>> code_fact(functools.partial(inspect.cleandoc)).startswith("cleandoc, code ")
    True
    >>> code_fact(len)
    'len'
    """
    call = _inmost(call)
    named = call if hasattr(call, "__qualname__") else type(call)
    function = function_of(call)
    return str(named.__qualname__) + ("" if function is None else f", code {_digest(function)} of {PYTHON}")


def function_of(call: Any) -> FunctionType | None:
    """What runs when it is called, without what decorators put around it; None where that is not written in Python."""
    call = _inmost(call)
    if not isinstance(call, FunctionType):
        call = getattr(call if isinstance(call, type) else type(call), "forward" if _is_module(call) else "__call__", None)
    return call if isinstance(call, FunctionType) else None


def _inmost(call: Any) -> Any:
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.unwrap(getattr(call, "__func__", call))


def _is_module(call: Any) -> bool:
    return isinstance(call, nn.Module) or (isinstance(call, type) and issubclass(call, nn.Module))


def _digest(function: FunctionType) -> str:
    return hashlib.sha256("\n".join(_words(function, set())).encode()).hexdigest()[:8]


def _words(function: FunctionType, known: set[FunctionType]) -> Iterator[str]:
    """Of the function, then of each one of its own file that it calls by name or holds."""
    known.add(function)
    names: list[str] = []
    yield from _of_code(function.__code__, function.__doc__, names)
    called = [function.__globals__.get(name) for name in names] + [_held(cell) for cell in function.__closure__ or ()]
    for each in (inspect.unwrap(one) for one in called if isinstance(one, FunctionType)):
        if isinstance(each, FunctionType) and each.__module__ == function.__module__ and each not in known:
            yield from _words(each, known)


def _of_code(code: CodeType, doc: str | None, names: list[str]) -> Iterator[str]:
    """Its instructions, the names and the constants in them: neither lines nor files, which differ where nothing has changed."""
    names += code.co_names
    yield from (code.co_code.hex(), repr(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant, None, names)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))  # in no order of its own
        elif constant != doc:
            yield repr(constant)


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
