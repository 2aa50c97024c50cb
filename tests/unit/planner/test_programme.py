"""While HiGHS solves, what it prints by itself stays out of stdout, and nothing else is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PRINTS = "import ctypes, os, threading\nfrom memfit.planner.silence import silence\nprint('before')\n"
_SOLVES = "with silence(): ctypes.CDLL(None).printf(b'of C\\n')\nprint('after')"
_BESIDE = """
solving, done = threading.Event(), threading.Event()
def beside():
    solving.wait()
    os.write(1, b'of a thread')
    done.set()
threading.Thread(target=beside).start()
with silence():
    solving.set()
    done.wait()
"""
_CLOSED = "os.close(1)\n" + "with silence(): pass\nos.write(2, b'went on')"


def output(program: str) -> tuple[str, str]:
    ran = subprocess.run([sys.executable, "-c", _PRINTS + program], capture_output=True, text=True, check=True)
    return ran.stdout, ran.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="C's own library has another name there")
def test_what_c_prints_is_not_seen() -> None:
    assert output(_SOLVES) == ("before\nafter\n", "")


def test_what_another_thread_prints_is_not_lost() -> None:
    assert output(_BESIDE) == ("before\n", "of a thread")


def test_a_process_without_stdout_is_no_obstacle() -> None:
    assert output(_CLOSED)[1].startswith("went on")
