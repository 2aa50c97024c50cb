"""The user's own code, called beside the step: loaders, factories. What it raises is told by their line, not as a fault of memfit's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from memfit.errors import MemfitError, StepError

NOT_TOLD = (KeyboardInterrupt, GeneratorExit)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_OF_WORKER = "Original Traceback (most recent call last):"  # a DataLoader raises a worker's error with all of this in its message
_FRAME = re.compile(r'File "(.+)", line (\d+).*\n *(.*)')


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """What is raised inside becomes a StepError that begins with these words, a sys.exit too; an error of memfit's own passes as it is."""
    try:
        yield
    except (MemfitError, *NOT_TOLD):
        raise
    except BaseException as error:
        raise StepError([f"{what} failed: {told(error)}"]) from error


def told(error: BaseException) -> str:
    """The user's line, what it raised and the way out."""
    place, line = _users_line(error)
    message = _message(error)
    raised = f"{place} raised {type(error).__name__}" + (f": {message}" if message else "")
    return "\n".join(part for part in (raised, line and f"    {line}", _way_out(error)) if part)


def _message(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    if _OF_WORKER not in message:
        return message
    return message.rstrip().rpartition("\n")[2].partition(": ")[2]


def _users_line(error: BaseException) -> tuple[str, str]:
    from memfit.capture.whereabouts import is_the_users, short_path

    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}", (error.text or "").strip()
    seen = [(frame.filename, str(frame.lineno), frame.line or "") for frame in traceback.extract_tb(error.__traceback__)]
    in_worker = _FRAME.findall(str(error)) if _OF_WORKER in str(error) else []
    frames = [frame for frame in (*seen, *in_worker) if is_the_users(frame[0])]
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    return (f"{short_path(own[-1][0])}:{own[-1][1]}", own[-1][2]) if own else ("torch", "")


def _way_out(error: BaseException) -> str:
    message = str(error).lower()
    if isinstance(error, MemoryError) or any(words in message for words in _OUT_OF_MEMORY):
        return "It does not fit in this machine's memory: --simulate profiles it without touching any."
    if isinstance(error, ImportError) and "relative import" in message:
        return "The file is part of a package: name it as package.module:function."
    if isinstance(error, ImportError):
        return "Install what is missing, or run memfit in the environment your training runs in."
    if isinstance(error, SystemExit):
        return 'What memfit calls must not end the program: put what should run only as a script under: if __name__ == "__main__".'
    return ""
