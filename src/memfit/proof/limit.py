"""How much memory a proof may take."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.process import memory_left, resident_bytes
from memfit.step import Step
from memfit.units import format_bytes

_OF_WHAT_IS_FREE = 0.9  # the rest is left to other programs


@dataclass(frozen=True)
class Limit:
    """What the process may take, and who says so: the user, or the machine it runs on."""

    bytes: int
    of_machine: bool = False

    @property
    def reason(self) -> str:
        """For a note: why fewer samples were taken."""
        return f"this machine has {format_bytes(self.bytes)} for it" if self.of_machine else f"the limit is {format_bytes(self.bytes)}"

    @property
    def whose(self) -> str:
        """After its bytes, where nobody has asked for them."""
        return ", which is what this machine has for it" if self.of_machine else ""


def limit_of_machine(step: Step) -> Limit | None:
    """What is left here, beside what the process holds already; None for a step on a device with memory of its own."""
    if any(p.device.type not in ("cpu", "meta") for model in step.models.values() for p in model.parameters()):
        return None
    held = resident_bytes()
    return Limit(held + int(_OF_WHAT_IS_FREE * max(0, memory_left() - held)), of_machine=True)


def lower(*limits: Limit | None) -> Limit | None:
    """The lowest of those there are."""
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.bytes, default=None)
