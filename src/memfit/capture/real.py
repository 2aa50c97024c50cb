"""A step run for real: what torch's allocator handed out, and when, by its own memory events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.capture.cuda_mark import UNVALIDATED, CudaMark, mark_of, measured_process
from memfit.capture.devices import device_named
from memfit.capture.labels import labelled
from memfit.capture.loaders import loader_workers
from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.capture.models import models_of
from memfit.capture.non_finite import FiniteLosses
from memfit.capture.process import base_bytes
from memfit.capture.reach import reaching
from memfit.capture.recorder import Recorder
from memfit.capture.rollback import rolled_back
from memfit.capture.whereabouts import ModulePath
from memfit.records import Trace
from memfit.step import Step, device_of

_MOST_STEPS = 4  # a step whose memory still grows after so many will grow for ever


@dataclass(frozen=True)
class _Recording:
    recorder: Recorder
    modules: ModulePath
    changes: list[list[int]]  # the allocator's events, a list for each op


def capture_real(step: Step, progress: Callable[[str], None]) -> Trace:
    """Run the step until its memory repeats, record it, and put everything back."""
    workers = loader_workers(step.loader)
    base = base_bytes(step)
    with rolled_back(step):
        recording, growth = _record_steady(step, progress)
        progress("timing a plain step")
        with mark_of(step) as mark:
            started = time.perf_counter()
            step.run(step.batch, schedule=False)
            seconds = time.perf_counter() - started
    ops = recording.recorder.ops(_workspaces(recording))
    return Trace(
        ops,
        recording.recorder.storages(),
        recording.recorder.saved(),
        recording.recorder.calls(),
        models_of(step, recording.modules),
        measured_process(mark, base, workers),
        predicted=False,
        device=device_of(step),
        batch_size=step.batch_size,
        step_seconds=seconds,
        growth_bytes=growth,
        half_is_cheap=device_named(device_of(step)).half_is_cheap,
        gradients_in_parts=recording.recorder.gradients_in_parts,
        notes=(UNVALIDATED,) if isinstance(mark, CudaMark) else (),
    )


def _record_steady(step: Step, progress: Callable[[str], None]) -> tuple[_Recording, int]:
    """The first step that leaves nothing new behind, and what each step leaves behind if there is none such."""
    with MemoryEvents() as events:
        progress("running a first step, which makes the optimizer's states")
        with reaching(step, FiniteLosses(step)) as watcher:
            step.run(step.batch, watcher, schedule=False)
        recordings: list[_Recording] = []
        for attempt in range(1, _MOST_STEPS):
            progress(f"recording step {attempt + 1}")
            recordings.append(_record(step, events))
            growth = min(recording.recorder.left_over() for recording in recordings[-2:])
            if not growth:  # nothing is left behind, or only what the next step replaces
                break
    last = recordings[-1]
    return replace(last, changes=events.sections()[-(last.recorder.now + 1) :]), growth if len(recordings) > 1 else 0


def _record(step: Step, events: MemoryEvents) -> _Recording:
    for optimizer in step.optimizers:
        optimizer.zero_grad()  # the step would do so itself, but its line begins without the last step's gradients
    modules = ModulePath(step.models)
    recorder = Recorder(modules, on_op=lambda *call: events.marker())
    with labelled(recorder, step), recorder:
        step.run(step.batch, recorder, schedule=False)
    return _Recording(recorder, modules, [])


def _workspaces(recording: _Recording) -> list[int]:
    """What each op took inside: its own peak, less what it left in storages we know."""
    made = recording.recorder.made_by_ops()
    return [max(0, peak_of(changes) - new) for changes, new in zip(recording.changes, made, strict=True)]
