"""Where in the user's program an operator was called: the module path and the source line."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_HERE = str(Path(__file__).resolve().parents[1])
_NOT_THE_USERS = (_HERE, str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<")
_STEP = f"{_HERE}/step.py"
_DEMO = f"{_HERE}/demo_step.py"  # ours, but it stands for a user's file
_SITE = sysconfig.get_paths()["purelib"]


class SourceLines:
    """Finds the innermost line that is neither torch's, nor Python's own, nor ours."""

    def __init__(self) -> None:
        self._is_the_users: dict[CodeType, bool] = {}
        self._names: dict[str, str] = {}

    def here(self) -> str:
        """The user's line that is running now, as "file.py:42", or ""."""
        frame: FrameType | None = sys._getframe(2)
        known = self._is_the_users
        while frame is not None:
            code = frame.f_code
            users = known.get(code)
            if users is None:
                users = known[code] = is_the_users(code.co_filename)
            if users:
                return f"{self._short(code.co_filename)}:{frame.f_lineno}"
            if code.co_filename == _STEP:  # whoever called the step did not make the tensor
                return ""
            frame = frame.f_back
        return ""

    def _short(self, path: str) -> str:
        short = self._names.get(path)
        if short is None:
            short = self._names[path] = short_path(path)
        return short


def is_the_users(path: str) -> bool:
    """Whether a file belongs to the user (or to a library of theirs) rather than to torch, Python or memfit."""
    if path.startswith(_NOT_THE_USERS[:2]):
        return path == _DEMO
    return path.startswith(_SITE) or not path.startswith(_NOT_THE_USERS)


def short_path(path: str) -> str:
    """A path as people would say it: from the working directory, or from the package it belongs to."""
    for root in (_SITE, str(Path.cwd())):
        if path.startswith(root + "/"):
            return path[len(root) + 1 :]
    return path


def _nothing(*told: object) -> None:
    """Nobody listens."""


class ModulePath:
    """Keeps the path of the module whose forward is running, for every module, also ones the step does not list."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._names: dict[int, str] = {}
        for prefix, model in models.items():
            for name, module in model.named_modules():
                self._names.setdefault(id(module), ".".join(part for part in (prefix, name) if part))
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self.current = ""
        self.outsiders: dict[str, nn.Module] = {}  # networks that only the loss holds: a perceptual network, say
        self.on_enter: Callable[[str], None] = _nothing
        self.on_leave: Callable[[str], None] = _nothing
        self.on_adopt: Callable[[str, nn.Module], None] = _nothing

    def __enter__(self) -> ModulePath:
        self._handles = [
            register_module_forward_pre_hook(self._push),
            register_module_forward_hook(self._pop, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()
        self.current = ""

    def _push(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            name = self._adopt(module)
        self._stack.append(self.current)
        self.current = name
        self.on_enter(name)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self.on_leave(self.current)
        self.current = self._stack.pop() if self._stack else ""

    def _adopt(self, module: nn.Module) -> str:
        prefix = f"{self.current}.{type(module).__name__}" if self.current else type(module).__name__
        self.outsiders[prefix] = module
        self.on_adopt(prefix, module)
        for name, member in module.named_modules():
            self._names.setdefault(id(member), f"{prefix}.{name}" if name else prefix)
        return prefix
