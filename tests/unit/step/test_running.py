"""What is put around a step: Ctrl-C waits, and is heard afterwards, whoever listens."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from memfit.step.running import interrupts_held_back

LETHAL = """
import signal
from memfit.step.running import interrupts_held_back
signal.signal(signal.SIGINT, signal.SIG_DFL)
with interrupts_held_back():
    signal.raise_signal(signal.SIGINT)
    print("the block is done", flush=True)
print("and nobody has heard")
"""


def test_ctrl_c_is_heard_when_the_block_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_heard_also_from_a_block_that_fails() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        raise ValueError


def test_ctrl_c_waits_for_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done


def test_a_process_that_ctrl_c_is_to_end_is_ended_after_the_block() -> None:
    ran = subprocess.run([sys.executable, "-c", LETHAL], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (-signal.SIGINT, "the block is done\n"), ran.stderr
