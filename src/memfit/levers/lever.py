"""What a lever is: one technique, twice: a pure rewrite of the Ledger, and a reversible change of the Step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from memfit.errors import MemfitError
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option, Trace
from memfit.step import Step


class Lever(Protocol):
    """The law: after `apply(step, option)`, `account(capture(step))` is what `rewrite(ledger_before, option)` said."""

    @property
    def name(self) -> str:
        """The lever's word: its file, its name on the command line, its test and its doc page."""

    @property
    def exactness(self) -> str:
        """The class of its strictest option."""

    @property
    def needs(self) -> str:
        """What must be given for it to act, in a few words for the table of levers."""

    @property
    def excludes(self) -> frozenset[str]:
        """Words of levers it cannot join."""

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """Where and how it could act on this step, each with its exactness; none where it would change nothing. Pure."""

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """Predicted memory and time with the option on. Pure."""

    def apply(self, step: Step, option: Option) -> Undo:
        """Change the step; the answer changes it back. Where the step does not allow it, CannotApply says why."""


class CannotApply(MemfitError):
    """A lever that does not suit this step; the message says why."""


def trace_of(ledger: Ledger) -> Trace:
    """The trace behind a ledger; one read from a file has none."""
    if ledger.trace is None:
        raise MemfitError("This profile was read from a file, without the trace a plan needs: profile the step again.")
    return ledger.trace


def why_left_out(names: Iterable[str], error: Exception) -> str:
    """In a line: levers that a step was tried with and does not take.

    >>> why_left_out(["saved", "microbatch"], ValueError("two classes"))
    'leaving out saved, microbatch: the step fails with it (ValueError: two classes)'
    """
    said = str(error).partition("\n")[0]
    reason = said if isinstance(error, CannotApply) else f"the step fails with it ({type(error).__name__}: {said})"
    return f"leaving out {', '.join(names)}: {reason}"
