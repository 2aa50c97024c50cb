"""Watches torch run a training step, real or simulated, and writes down a Trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from memfit.capture.op_times import OpCalls
from memfit.capture.real import capture_real
from memfit.capture.simulated import capture_simulated
from memfit.errors import MemfitError
from memfit.records import Trace
from memfit.step import Step, device_of

__all__ = ["capture"]

Progress = Callable[[str], None]


def capture(
    step: Step,
    simulate: bool = False,
    device: str | None = None,
    progress: Progress = lambda words: None,
    calls: OpCalls | None = None,
    half: Sequence[str] = (),
) -> Trace:
    """One steady step as a Trace; `simulate` allocates nothing, and may be for a `device` that is not here.

    `calls` takes the operator calls of a simulated step that could be timed on this machine. `half` asks a simulation to measure, too,
    what products and convolutions would take inside in types of half precision.
    """
    with _functional_gradients_refused():
        if simulate:
            return capture_simulated(step, device, progress, calls, half)
        return _really(step, device, progress)


@contextmanager
def _functional_gradients_refused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise MemfitError(
            "This step takes gradients through torch.func (grad, vjp, jacrev, hessian), where torch lets nobody see what it keeps: "
            "take them with torch.autograd.grad(..., create_graph=True) instead."
        ) from error


def _really(step: Step, device: str | None, progress: Progress) -> Trace:
    if device is not None and device.split(":")[0] != device_of(step):
        raise MemfitError(
            f"This step is built on {device_of(step)}, so a real run happens there, not on {device}: "
            f"build it on {device}, or ask for a prediction with --simulate (in Python: simulate=True)."
        )
    return capture_real(step, progress)
