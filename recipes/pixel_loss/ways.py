"""The ways to train this: as documented, with the documented fixes, with memfit's plans; predicted, or run in processes of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_levers, apply_plan
from memfit.levers import LEVERS
from memfit.records import Option, Plan, PlannedLever
from memfit.units import format_bytes
from recipes.kit.budget import levers_in_words
from recipes.kit.measuring import Measured, Way, measure
from recipes.pixel_loss.loss import Chunks
from recipes.pixel_loss.train import make_step

HERE = "recipes.pixel_loss.ways"
ORIGINAL, CHUNKS, HAND_FIX = "original", "by hand: PIXEL_LOSS_CHUNK_SIZE=1", "by hand: two finest levels checkpointed"
BY_HAND: dict[str, dict[str, Any]] = {
    ORIGINAL: {},
    CHUNKS: {"chunk_size": 1},
    HAND_FIX: {"hand_fix": True},
    "by hand: both": {"chunk_size": 1, "hand_fix": True},
}


@dataclass(frozen=True)
class Case:
    """Images of one size, and how much of the original's process memfit may use, exactly and with rounding allowed."""

    image_size: int
    batch_size: int
    shares: tuple[float, ...] = ()
    rounded: tuple[float, ...] = ()
    by_hand: tuple[str, ...] = (ORIGINAL, HAND_FIX)

    @property
    def asked(self) -> list[tuple[float, str]]:
        """What memfit is asked for: a share, and the loosest class of exactness it may use."""
        return [(share, "reordered") for share in self.shares] + [(share, "rounded") for share in self.rounded]

    @property
    def name(self) -> str:
        """As a table says it."""
        return f"{self.batch_size} × {self.image_size}²"

    @property
    def sizes(self) -> dict[str, Any]:
        """As the functions that make a step take them."""
        return {"image_size": self.image_size, "batch_size": self.batch_size}


def make_original(image_size: int, batch_size: int, hand_fix: bool = False, chunk_size: int | None = None) -> memfit.Step:
    """The step as it is documented, or with a documented fix."""
    return make_step(image_size, batch_size, hand_fix, Chunks(chunk_size) if chunk_size else None)


def make_planned(image_size: int, batch_size: int, plan: str) -> memfit.Step:
    """The step with a plan on."""
    step = make_step(image_size, batch_size)
    apply_plan(step, Plan.load(plan))
    return step


def make_one_at_a_time(image_size: int, batch_size: int) -> memfit.Step:
    """The step with nothing but chunks of one, each with a backward of its own."""
    step = make_step(image_size, batch_size)
    option = one_at_a_time(Case(image_size, batch_size))
    apply_levers(step, [PlannedLever(option.lever, option.name, option.exactness, settings=option.settings)])
    return step


def one_at_a_time(case: Case) -> Option:
    """The smallest chunks."""
    return LEVERS["chunk"].options(memfit.profile(simulated(case), simulate=True))[-1]


def simulated(case: Case, **settings: Any) -> memfit.Step:
    """Without memory for it."""
    return built_without_memory(lambda: make_original(**case.sizes, **settings))


def planned(case: Case, share: float, allow: str) -> Plan:
    """The plan for a process that may use this share of what the original adds to an empty one."""
    step = simulated(case)
    ledger = memfit.profile(step, simulate=True)
    base = ledger.process.base_bytes
    return memfit.plan(step, base + int((ledger.process_high_bytes - base) * share), allow=allow)


def asked_in_words(share: float, allow: str) -> str:
    """A table's name for what memfit is asked for.

    >>> asked_in_words(0.2, "reordered")
    'memfit, exact, 20%'
    """
    return f"memfit, {'rounding allowed' if allow == 'rounded' else 'exact'}, {share:.0%}"


def measured(case: Case, rounds: int = 3) -> list[Measured]:
    """Each way in a process of its own, timed in turns. What this machine has not the memory for is predicted, not run."""
    ways = [Way(name, f"{HERE}:make_original", {**case.sizes, **BY_HAND[name]}) for name in case.by_hand]
    words: dict[str, str] = {}
    not_run = {way.name: too_large for way in ways if (too_large := _too_large(way))}
    with tempfile.TemporaryDirectory() as folder:
        for number, (share, allow) in enumerate(case.asked):
            path = Path(folder) / f"{number}.json"
            ways.append(Way(asked_in_words(share, allow), f"{HERE}:make_planned", {**case.sizes, "plan": str(path)}))
            try:
                plan = planned(case, share, allow)
            except memfit.MemfitError as error:
                not_run[ways[-1].name] = Measured(ways[-1].name, refused=str(error))
                continue
            plan.save(path)
            words[ways[-1].name] = levers_in_words(plan)
        found = {it.name: it for it in measure([way for way in ways if way.name not in not_run], rounds)}
    return [replace((not_run | found)[way.name], plan=words.get(way.name, "")) for way in ways]


def _too_large(way: Way) -> Measured | None:
    step = built_without_memory(lambda: make_original(**way.settings))
    plain, free = memfit.profile(step, simulate=True), psutil.virtual_memory().available
    if plain.process_high_bytes < free:
        return None
    why = f"not run: {format_bytes(plain.process_bytes)} predicted for the process, {format_bytes(free)} free here"
    return Measured(way.name, peak_bytes=plain.peak_bytes, refused=why)


def measured_row(case: Case, result: Measured, found: Sequence[Measured]) -> list[str]:
    """Of all that was found: saved is of the first one's peak, and time of the first that could be run."""
    if result.refused:
        return [case.name, result.name, result.refused, "", "", "", ""]
    seconds = next(other.seconds for other in found if not other.refused)
    less = saved(result.peak_bytes, found[0].peak_bytes) + (" of what is predicted" if found[0].refused else "")
    process, slower = format_bytes(result.process_bytes), f"{result.seconds / seconds:.2f}"
    return [case.name, result.name, format_bytes(result.peak_bytes), less, process, slower, result.plan]


def saved(peak: int, original: int) -> str:
    """A share of the original's peak; nothing for the original itself.

    >>> saved(25, 100), saved(100, 100)
    ('75.0%', '')
    """
    return f"{1 - peak / original:.1%}" if peak != original else ""
