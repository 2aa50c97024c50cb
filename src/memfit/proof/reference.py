"""The plain step, run in several ways from the same state: as it is, again, moved by a hair, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch

from memfit.capture.rollback import rolled_back
from memfit.proof.draws import CannotReplay, DrawsRecorded, DrawsReplayed, InFloat64
from memfit.proof.fitting_sample import Sample
from memfit.proof.kept_in_file import kept_in_file
from memfit.proof.noise import noisy
from memfit.proof.observing import Outcome, feed, observe
from memfit.proof.places import Places
from memfit.proof.sampling import Batches
from memfit.proof.shelf import Shelf, same_bits
from memfit.step import Step
from memfit.step.batches import map_tensors

_NOISE = ("gradients", "later", "buffers", "end buffers")  # what is measured of it
_THREADS = (1, 2, 4)  # few: each is a run of the plain step


class Reference:
    """What a fitted step is compared with. Each run happens when it is first asked for, and is rolled back."""

    def __init__(self, sample: Sample, steps: int, progress: Callable[[str], None] = lambda words: None) -> None:
        self.sample, self.step, self.places, self.progress = sample, sample.step, Places.of(sample.step), progress
        one_batch = sample.room is not None and not sample.room.copy
        self.batches = Batches(self.step.batch, steps, one_batch)
        self._rough: dict[float, Outcome] = {}
        self.why_one_batch = "a second batch does not fit the limit" if one_batch else ""

    @cached_property
    def start(self) -> Shelf:
        """The parameters and states all runs start from."""
        shelf = Shelf()
        self.places.shelve_parameters(shelf)
        self.places.shelve_states(self.step, shelf)
        return shelf

    @contextmanager
    def _plainly(self, in_file: bool = False) -> Iterator[None]:
        """Around a run of the plain step: everything is put back, and where memory is short autograd keeps its tensors in a file."""
        with rolled_back(self.step), kept_in_file(self.step) if in_file or self.sample.in_file else nullcontext():
            yield

    @cached_property
    def plain(self) -> Outcome:
        """The step as it is."""
        self.progress("running the plain step")
        try:
            with self._plainly():
                return observe(self.step, self.places, self.batches)
        except Exception as error:  # the user's own, which comes again if the order was not its reason
            self.batches = replace(self.batches, in_one_order=True)
            self.why_one_batch = f"with its samples in another order the plain step fails ({type(error).__name__}: {error})"
        with self._plainly():
            return observe(self.step, self.places, self.batches)

    @cached_property
    def again(self) -> Outcome:
        """The same once more."""
        self.progress("running the plain step again")
        with self._plainly():
            return observe(self.step, self.places, self.batches)

    @cached_property
    def repeats(self) -> bool:
        """Whether two plain runs give the same bits."""
        first, second = self.plain.shelf, self.again.shelf
        same = all(key in first and same_bits(first.get(key), second.get(key)) for key in second)
        return same and self.plain.losses == self.again.losses

    @property
    def found_unsteady(self) -> bool:
        """Whether it has been asked, and the answer was no."""
        return "repeats" in vars(self) and not self.repeats

    @cached_property
    def moved(self) -> Outcome:
        """The step with everything off by its last bit: what rounding may do to it."""
        return self._moved_by(None)

    def roughly_moved(self, eps: float) -> Outcome:
        """The same for a coarser type: everything off by its eps."""
        if eps not in self._rough:
            self._rough[eps] = self._moved_by(eps)
        return self._rough[eps]

    @cached_property
    def resummed(self) -> tuple[Outcome, ...]:
        """The step with its long sums in other orders: torch cuts them up by its number of threads.

        More threads take more memory, so they only run where there was room for float64.
        """
        now = torch.get_num_threads()
        return tuple(self._with_threads(count) for count in _THREADS if count < now or (count > now and self.sample.float64))

    def _with_threads(self, count: int) -> Outcome:
        self.progress("measuring the noise of summation")
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            with self._plainly():
                return observe(self.step, self.places, self.batches, *_NOISE)
        finally:
            torch.set_num_threads(before)

    def _moved_by(self, eps: float | None) -> Outcome:
        self.progress("measuring the noise of rounding")
        with self._plainly(self.sample.moved_in_file), noisy(self.places, eps):
            return observe(self.step, self.places, self.batches, *_NOISE)

    @cached_property
    def exact(self) -> Outcome:
        """The first step in float64, with the same random draws; or the reason why not."""
        return self.first_step_in_float64()

    def first_step_in_float64(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> Outcome:
        """The same with something around it: levers."""

        def run() -> Outcome:
            with around():
                return observe(self.step, self.places, Batches(map_tensors(_double, self.step.batch), 1), "gradients", "buffers")

        return self._in_float64(run)

    @cached_property
    def fed(self) -> Outcome:
        """The optimizers in float64, on the plain step's gradients."""
        return self._in_float64(lambda: feed(self.step, self.places, self.plain.shelf))

    @cached_property
    def _drawn(self) -> tuple[Shelf, str]:
        """The random draws of the first step, and why they cannot be replayed if so."""
        recorder = DrawsRecorded(Shelf())
        with self._plainly(), recorder:
            observe(self.step, self.places, replace(self.batches, count=1), "none of it")
        op = recorder.unreplayable
        return recorder.shelf, f"{op} draws random numbers that cannot be replayed" if op else ""

    def _in_float64(self, run: Callable[[], Outcome]) -> Outcome:
        if not self.sample.float64:
            return Outcome(failure="it would not fit the limit")
        if any(p.dtype is torch.float64 for p in self.places.parameters):
            return Outcome(failure="the step computes in float64 itself")
        self.progress("running the plain step in float64")
        draws, failure = self._drawn
        if failure:
            return Outcome(failure=failure)
        try:
            with rolled_back(self.step), _doubled(self.step, self.places), InFloat64(), DrawsReplayed(draws):
                return run()
        except CannotReplay as error:
            failure = str(error)
        except Exception as error:  # an op without float64, or without the memory for it: the proof goes on with less
            failure = f"it raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Outcome(failure=failure)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _doubled(step: Step, places: Places) -> Iterator[None]:
    """Parameters, buffers and states are exchanged for float64 ones. Rolling back puts the old ones in their place again."""
    default = torch.get_default_dtype()
    for parameter in places.parameters:
        parameter.data = _double(parameter.data)
    for module, name in places.buffers.values():
        if (buffer := module._buffers[name]) is not None:
            module._buffers[name] = _double(buffer)
    for optimizer in step.optimizers:
        for state in optimizer.state.values():
            state.update({key: _double(v) for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim()})
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
