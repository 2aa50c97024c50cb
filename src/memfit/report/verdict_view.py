"""What a verdict tells, chosen once for every way of showing it: rows, words and their order; no colours, no widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from memfit.records import Verdict
from memfit.units import format_seconds

_MEANINGS = {
    "bitwise": "bit for bit",
    "reordered": "up to the order of summation",
    "redrawn": "in distribution only",
    "rounded": "up to the rounding of fewer bits",
}
_BY_DESIGN = {  # where it is what was asked for, and where it is not even that
    "redrawn": (
        "The fitted step is the same training in distribution only.",
        "The fitted step is not the same training, not even in distribution.",
    ),
    "altered": (
        "The fitted step is not the same training, by design.",
        "The fitted step was to be another training, and it cannot be run.",
    ),
}
_NOUNS = {
    "gradients": "gradient",
    "parameters": "parameter",
    "optimizer_state": "optimizer state",
    "buffers": "buffer",
    "rng": "random generator",
}


@dataclass(frozen=True, slots=True)
class LossRow:
    """A loss of one step, plain and fitted."""

    name: str
    plain: str
    fitted: str
    difference: str


@dataclass(frozen=True, slots=True)
class VerdictView:
    """Everything a verdict shows, in the order it is shown."""

    setting: str
    equivalent: bool
    answer: str
    meaning: str
    facts: tuple[tuple[str, str], ...]
    losses: tuple[LossRow, ...]
    notes: tuple[str, ...]


def verdict_view(verdict: Verdict) -> VerdictView:
    """The rows and words of a verdict."""
    return VerdictView(
        f"{verdict.exactness} · {_count(len(verdict.trajectory.get('reference', ())), 'step')} · {format_seconds(verdict.seconds)}",
        verdict.equivalent,
        _answer(verdict),
        _meaning(verdict),
        tuple(_facts(verdict)),
        tuple(_losses(verdict)),
        verdict.notes,
    )


def _answer(verdict: Verdict) -> str:
    if verdict.unproven:
        return "Not proven"
    return "Equivalent" if verdict.equivalent else "Not equivalent"


def _meaning(verdict: Verdict) -> str:
    how = _MEANINGS.get(verdict.exactness, "by design")
    if verdict.unproven and not verdict.levers:
        return "Whether the fitted step is the same training is not known."
    if verdict.unproven:
        left_out = ", ".join(verdict.not_compared)
        return f"With {', '.join(verdict.levers)} it is the same training, {how}; with {left_out} too, it could not be proven here."
    if verdict.equivalent:
        return f"The fitted step is the same training, {how}."
    if verdict.by_design or verdict.exactness in _BY_DESIGN:
        as_claimed, failed = _BY_DESIGN.get(verdict.exactness, _BY_DESIGN["redrawn"])  # beside one that rounds
        return as_claimed if verdict.by_design else failed
    return f"The fitted step is not the same training: it was to be the same {how}."


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "Levers", ", ".join(verdict.levers) or "none"
    if verdict.not_compared:
        yield "Left out", ", ".join(verdict.not_compared)
    if verdict.culprit:
        yield "To blame", verdict.culprit
    if verdict.culprit_because:
        yield "Because", verdict.culprit_because
    yield "Worst", _worst(verdict)
    yield "Compared", ", ".join(_count(verdict.compared.get(kind, 0), noun) for kind, noun in _NOUNS.items())


def _worst(verdict: Verdict) -> str:
    what, error, bound = verdict.worst.what, verdict.worst.error, verdict.worst.bound
    if error == bound == 0:
        return "every bit that was compared is the same"
    if error is None or bound is None:
        return what
    return f"{what.rstrip(',')}: off by {error:.3g}, at most {bound:.3g} is allowed"


def _losses(verdict: Verdict) -> Iterator[LossRow]:
    plain, fitted = verdict.trajectory.get("reference", ()), verdict.trajectory.get("fitted", ())
    nothing: dict[str, float | None] = {}
    for number, (a, b) in enumerate(zip_longest(plain, fitted, fillvalue=nothing), 1):
        for name in a or b:
            word = f"step {number}" if name == "loss" else f"step {number}, {name}"
            yield LossRow(word, _number(a.get(name)), _number(b.get(name)), _difference(a.get(name), b.get(name)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def _difference(plain: float | None, fitted: float | None) -> str:
    if plain is None or fitted is None:
        return "-"
    return "none" if plain == fitted else f"{fitted - plain:+.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
