"""Steps simulated, with what their operators cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.capture import capture
from memfit.capture.op_times import OpCalls, timed
from memfit.capture.part_times import part_costs
from memfit.capture.simulation import built_without_memory
from memfit.capture.speeds import speeds_here
from memfit.errors import StepError
from memfit.ledger import account
from memfit.planner.costs import seconds_of
from memfit.records import Ledger
from memfit.step import Step
from memfit.users_code import users_code


def variants_of(step: Step, seen: Callable[[Step], Ledger], progress: Callable[[str], None]) -> dict[str, Ledger]:
    """The ledgers of the steps that the user would accept as well, each built without memory, and simulated as `seen` does."""
    found = {}
    for name, build in step.variants.items():
        progress(f"simulating the variant {name!r}")
        with users_code(f"its variant {name!r}"):
            variant = built_without_memory(build)
        if not isinstance(variant, Step):
            raise StepError([f"its variant {name!r} returned a {type(variant).__name__}: let the factory return a Step"])
        found[name] = seen(variant)
    return found


def seen_with_times(
    step: Step, device: str | None = None, half: Sequence[str] = (), progress: Callable[[str], None] = lambda words: None
) -> Ledger:
    """A step simulated as it is now, with what its ops cost."""
    calls = OpCalls()
    return with_times(account(capture(step, True, device, progress, calls, half)), calls, progress)


def with_times(plain: Ledger, calls: OpCalls, progress: Callable[[str], None] = lambda words: None) -> Ledger:
    """A simulated step's ledger with the seconds its ops take on this machine; as it was for a device that is not here."""
    assert plain.trace is not None
    if not calls.by_op:
        return plain
    trace = timed(plain.trace, calls, seconds_of(plain.trace, speeds_here()).tolist(), progress)
    seconds, costs = float(seconds_of(trace, speeds_here()).sum()), part_costs(trace, calls, progress)
    trace = replace(trace, step_seconds=seconds, part_costs=costs, fresh_bytes_a_second=speeds_here().fresh)
    return replace(plain, trace=trace, step_seconds=seconds)
