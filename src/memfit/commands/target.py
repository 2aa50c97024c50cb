"""TARGET: from `file.py:function` or `package.module:function` to the Step that the function returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError, StepError, TargetError
from memfit.users_code import NOT_TOLD, told

if TYPE_CHECKING:
    from memfit.step import Step


def load_step(target: str, simulate: bool) -> Step:
    """The step that TARGET's function builds; without memory for it when it is to be simulated."""
    from memfit.capture.simulation import built_without_memory
    from memfit.step import Step

    place, colon, name = target.rpartition(":")
    if name and colon and not place:
        raise TargetError(f"{target!r} names no file or module: write path/to/file.py:{name} or package.module:{name}.")
    if not (colon and name):
        raise TargetError(f"{target!r} names no function: write path/to/file.py:function or package.module:function.")
    is_file = place.endswith(".py") or os.sep in place or place.startswith(".")
    function = _function(_module_from_file(Path(place)) if is_file else _module_named(place), place, name)
    with _told_as_target_error(f"{target} failed"):
        step = built_without_memory(function) if simulate else function()
    if not isinstance(step, Step):
        hint = "is its return statement missing?" if step is None else "return memfit.Step(model, loss, optimizer, batch)."
        raise TargetError(f"{target} returned {_kind(step)}, not a Step: {hint}")
    return step


@contextmanager
def step_errors() -> Iterator[None]:
    """What the user's step raises while it runs becomes a StepError, a sys.exit among it; an error of memfit's own passes as it is."""
    try:
        yield
    except (MemfitError, *NOT_TOLD):
        raise
    except BaseException as error:
        if not _is_the_steps(error):
            raise
        raise StepError([told(error)]) from error


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(_no_such_file(path))
    path = path.resolve()
    _first_on_path(str(path.parent))
    known = sys.modules.get(path.stem)
    taken = known is not None and getattr(known, "__file__", None) != str(path)  # a train.py must not replace torch
    name = f"{path.stem}_target" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file: TARGET's file ends in .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _told_as_target_error(f"{path.name} cannot be loaded"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_named(name: str) -> ModuleType:
    _first_on_path(os.getcwd())
    with _told_as_target_error(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise TargetError(
                f"There is no module {error.name!r}, neither installed nor in {os.getcwd()}: "
                "run memfit where the package is, or give the file, as in path/to/file.py:function."
            ) from None


def _first_on_path(directory: str) -> None:
    """It stays there, as for a script that Python runs: functions may import later, too."""
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)


def _no_such_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory: give the file in it, as in {path}/train.py:function."
    there = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, there, 1, 0.75)  # ".py" alone makes short names alike
    guess = f" Did you mean {path.parent / close[0]}?" if close else " Check the path."
    return f"There is no file {path} (seen from {os.getcwd()}).{guess}"


def _function(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    if not hasattr(module, name):
        raise TargetError(_no_such_function(module, place, name))
    function: Callable[[], Any] = getattr(module, name)
    if not callable(function):
        raise TargetError(f"{place}:{name} is {_kind(function)}, not a function: name a function that returns a Step.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature: calling it will tell
        return function
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise TargetError(
            f"{place}:{name} needs arguments ({', '.join(needed)}), and memfit has none to give: "
            "give them defaults, or name a function that calls it."
        )
    return function


def _no_such_function(module: ModuleType, place: str, name: str) -> str:
    own = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    close = difflib.get_close_matches(name, own, 1)
    guess = f" Did you mean {place}:{close[0]}?" if close else ""
    there = f"It has {', '.join(sorted(own))}." if own else "It has no functions at all: write one that returns a memfit.Step."
    return f"{place} has no function {name!r}.{guess} {there}"


@contextmanager
def _told_as_target_error(what: str) -> Iterator[None]:
    try:
        yield
    except (MemfitError, *NOT_TOLD):
        raise
    except BaseException as error:  # also a sys.exit, and what test frameworks end a test with
        raise TargetError(f"{what}: {told(error)}") from error


def _is_the_steps(error: BaseException) -> bool:
    """Raised while the step ran, and not by a line of memfit's that watches it, unless that hands the step's own call on to torch."""
    import memfit.step.step

    runs = memfit.step.step.__file__
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).resolve().parents[1])
    ran = any(frame.filename == runs for frame in frames)
    last = frames[-1]
    hands_on = last.name.startswith("__torch_") and "func(*args" in (last.line or "")
    return ran and (hands_on or last.filename == runs or not last.filename.startswith(ours))


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"
