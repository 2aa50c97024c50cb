"""What changes when the step is meant for another device than the one it is traced on (fake CPU tensors)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from memfit.capture.cuda_kernels import cuda_kernels
from memfit.errors import MemfitError
from memfit.records import Storage
from memfit.step import Step

_UNVALIDATED = (
    "{0} was simulated on fake CPU tensors with {0}'s kernels and rounding put in their place; this is not validated on hardware."
)


@dataclass(frozen=True)
class Device:
    """How a device differs, as far as memory is concerned."""

    name: str
    rounding: int = 1  # its allocator hands out multiples of this
    measures_workspaces: bool = False  # by running ops here
    half_is_cheap: bool = False
    notes: tuple[str, ...] = ()
    kernels: Callable[[], AbstractContextManager[object]] = nullcontext
    foreach_optimizers: bool = False  # torch's choice when the user makes none

    def rounded(self, storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
        """Storages as large as the device's allocator makes them."""
        return tuple(replace(s, bytes=-(-s.bytes // self.rounding) * self.rounding) for s in storages)

    @contextmanager
    def rules(self, step: Step) -> Iterator[None]:
        """While it is entered, the step takes the way it would take on the device."""
        groups = [group for o in step.optimizers for group in o.param_groups] if self.foreach_optimizers else []
        unset = [g for g in groups if "foreach" in g and g["foreach"] is None and not g.get("fused")]
        for group in unset:
            group["foreach"] = True
        step.running.simulated_on = self.name
        try:
            with self.kernels():
                yield
        finally:
            step.running.simulated_on = None
            for group in unset:
                group["foreach"] = None


_DEVICES = {
    "cpu": Device("cpu", measures_workspaces=True),
    "cuda": Device("cuda", 512, half_is_cheap=True, notes=(_UNVALIDATED.format("cuda"),), kernels=cuda_kernels, foreach_optimizers=True),
    "mps": Device("mps", 256, half_is_cheap=True, notes=(_UNVALIDATED.format("mps"),)),
}


def device_named(name: str) -> Device:
    """The device with this name; an index as in "cuda:0" does not matter to memory."""
    kind = name.split(":")[0].lower()
    if kind not in _DEVICES:
        raise MemfitError(f"{name!r} is not a device memfit can simulate: choose one of {', '.join(_DEVICES)}.")
    return _DEVICES[kind]
