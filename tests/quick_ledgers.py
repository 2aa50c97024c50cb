"""Ledgers for tests that need a trace and no bytes."""

from __future__ import annotations

from memfit import Ledger, Step
from memfit.capture.fake_recorder import FakeRecorder
from memfit.capture.labels import labelled
from memfit.capture.simulation import simulated
from memfit.capture.whereabouts import ModulePath
from memfit.ledger import account
from memfit.records import Process, Trace


def seen(step: Step) -> Ledger:
    """The step's ledger without workspaces and process, which take time to measure."""
    with simulated(step) as fake:
        recorder = FakeRecorder(ModulePath(fake.models))
        with labelled(recorder, fake), recorder:
            fake.run(fake.batch, recorder, schedule=False)
    ops = recorder.ops([0] * (recorder.now + 1))
    seen = (ops, recorder.storages(), recorder.saved(), recorder.calls(), (), Process(0), True, "cpu", step.batch_size)
    return account(Trace(*seen, gradients_in_parts=recorder.gradients_in_parts))
