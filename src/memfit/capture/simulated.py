"""A step run on fake tensors: no memory is touched, and the device need not be here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from memfit.capture.devices import Device, device_named
from memfit.capture.fake_recorder import FakeRecorder
from memfit.capture.labels import labelled
from memfit.capture.models import models_of, with_states_from_the_start
from memfit.capture.op_times import OpCalls
from memfit.capture.process import base_bytes, predicted_process
from memfit.capture.reach import reaching
from memfit.capture.simulation import simulated
from memfit.capture.whereabouts import ModulePath
from memfit.capture.workspaces import OpBytes, Workspaces
from memfit.errors import StepError
from memfit.records import Op, Process, Trace
from memfit.step import Step, device_of
from memfit.step.faults import value_faults


def capture_simulated(
    step: Step, device: str | None, progress: Callable[[str], None], calls: OpCalls | None = None, half: Sequence[str] = ()
) -> Trace:
    """The steady step, predicted; `calls` is told of every op that could be timed here, `half` names further types to measure it in."""
    if device is None and (faults := value_faults(step)):
        raise StepError(faults)
    target = device_named(device or device_of(step))
    base = base_bytes(step)
    progress("simulating the step")
    with simulated(step) as fake, target.rules(fake):
        first = all(_is_new(optimizer) for optimizer in fake.optimizers)
        if not first:
            _record(fake, target, calls, half)
        recorder, modules, workspaces = _record(fake, target, calls, half)
        growth = 0
        if recorder.left_over():  # made once and kept, replaced by every step, or a leak: a second one tells
            earlier = recorder
            recorder, modules, workspaces = _record(fake, target, calls, half)
            growth = min(earlier.left_over(), recorder.left_over())
        models = models_of(fake, modules)
    taken = workspaces.of_ops(recorder.made_by_ops(), progress)
    storages = recorder.storages(taken.hidden)
    storages = target.rounded(with_states_from_the_start(storages) if first else storages)
    trace = Trace(
        _with_half(recorder.ops(taken.inside, taken.unsure), taken),
        storages,
        recorder.saved(),
        recorder.calls(),
        models,
        Process(0),
        predicted=True,
        device=target.name,
        batch_size=step.batch_size,
        growth_bytes=growth,
        half_is_cheap=target.half_is_cheap,
        gradients_in_parts=recorder.gradients_in_parts,
        notes=target.notes,
    )
    progress("predicting what the process takes")
    return replace(trace, process=predicted_process(trace, step, base))


def _with_half(ops: tuple[Op, ...], taken: OpBytes) -> tuple[Op, ...]:
    """Ops that were measured in half precision, too, say so."""
    in_half = (taken.in_half.get(number, {}) for number in range(len(ops)))
    return tuple(
        replace(op, bfloat16_workspace=half.get("bfloat16"), float16_workspace=half.get("float16")) if half else op
        for op, half in zip(ops, in_half, strict=True)
    )


def _is_new(optimizer: Optimizer) -> bool:
    """It has no states yet, and the step that makes them will be like any other but for that.

    So it is with torch's own optimizers; of others we do not know, and let them take a step before the one that counts.
    """
    return type(optimizer).__module__.startswith("torch.optim") and not optimizer.state


def _record(step: Step, target: Device, calls: OpCalls | None, half: Sequence[str]) -> tuple[FakeRecorder, ModulePath, Workspaces]:
    for optimizer in step.optimizers:
        optimizer.zero_grad()
    workspaces, modules = Workspaces(half), ModulePath(step.models)

    def note(*op: Any) -> None:
        workspaces.note(*op)
        if calls is not None:
            calls.note(*op)

    recorder = FakeRecorder(modules, on_op=note if target.measures_workspaces else None)
    with reaching(step, recorder) as watcher, labelled(recorder, step), _no_cycles_found(), recorder:
        step.run(step.batch, watcher, schedule=False)
    return recorder, modules, workspaces


@contextmanager
def _no_cycles_found() -> Iterator[None]:
    """A simulation makes many objects for each op, so cycles would be found, and their tensors freed, sooner than in a real step."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
