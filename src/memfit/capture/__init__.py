"""Watches torch run a training step, real or simulated, and writes down a Trace.

recorder.py is a dispatch mode that gives every operator call a number and every storage an interval [born, died] on that line. Module
hooks (whereabouts.py) tell the module path, the Python stack tells the user's line, saved-tensor hooks tell what autograd keeps for
which op; a backward op finds its forward op by the number of the autograd node that is running (autograd_nodes.py, private in torch,
with a fallback).

- gradient_sums.py: autograd adds gradients in place where nobody else holds the first, but not while a dispatch mode watches; the
  recorder does it in its stead.
- real.py runs the step until it leaves nothing new behind, inside rollback.py, which puts everything back from a file, modules' own
  attributes included. torch's own memory events (memory_events.py), cut at each op by marker allocations in the same stream, give what
  each op took inside.
- simulated.py runs it on fake tensors that stand in for the real ones (simulation.py), once: torch's optimizers make their states in
  the first step and then do the same work in every one. fake_recorder.py sets right where fake kernels differ from real ones,
  known_numbers.py knows the numbers a program lists by itself, caches.py leaves no fake tensor in a cache of the process.
- Both refuse a loss that reaches nothing its optimizers train (reach.py).
- workspaces/ gives a simulated op the bytes it takes inside: each distinct call is run once on zeros under memory events, at its own
  size or, if that is above 12 MiB, at two smaller sizes on a line (shrinking.py, extending.py), and remembered per torch version,
  instruction set and threads. Shapes that no program asked for, and ops not known to be harmless on zeros, are tried in a process of
  their own (apart.py). Where a plan may round, products and convolutions are measured in half precision as well, for the precision
  lever.
- unwatched.py runs a step with nothing but memory events around it: compiled code does not run under a recorder.
- devices.py, cuda_kernels.py: for CUDA, calls that keep other tensors there are exchanged, sizes rounded, and the caching allocator
  followed block by block (cuda_allocator.py, exact on recorded traces). A real step's peak and process there are torch.cuda's own
  statistics (cuda_mark.py). Not validated on hardware.
- process.py: interpreter and libraries are measured in the running process; the heap's slack comes from replaying the step's
  allocations through this machine's own malloc in a fresh process (heap.py, heap_replay.py), unless the allocator lever sees to it
  (Running.beside); loader workers are started and weighed, once for each setting (loaders.py). How far it may grow is the machine's
  free memory or what its control groups leave to it (cgroups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from memfit.capture.conditions import conditions_of
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
        trace = capture_simulated(step, device, progress, calls, half) if simulate else _really(step, device, progress)
    return replace(trace, conditions=conditions_of(step.batch, trace.device))


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
