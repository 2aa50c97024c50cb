"""Puts a table of saved tensors onto a step, and takes it off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memfit.levers.lever import CannotApply
from memfit.levers.saved.elsewhere import Elsewhere, puts_away
from memfit.levers.saved.forward import Forward
from memfit.levers.saved.table import PhaseTable, Region
from memfit.levers.undo import Undo
from memfit.step import Step
from memfit.step.chunking import chunks_watched_by


class _Active:
    """The computation that is under way, if one is, and how often each module was called in it."""

    def __init__(self) -> None:
        self.forward: Forward | None = None
        self.to_be_differentiated: Forward | None = None
        self.calls: Counter[str] = Counter()
        self.inside: list[str] = []  # the calls for which the dispatch mode was entered
        self._calls_before: Counter[str] = Counter()

    def enter(self, path: str) -> None:
        """A module is called: if it is a region of the table, watch its operators."""
        forward = self.forward
        if forward is None:
            return
        ordinal = self.calls[path]
        self.calls[path] += 1
        region = Region(path, ordinal)
        if self.inside:
            self.inside.append(path)
        elif region in forward.table.regions:
            forward.enter_region(region)
            self.inside.append(path)

    def leave(self, path: str) -> None:
        """The module is done."""
        if self.forward is not None and self.inside and self.inside[-1] == path:
            self.inside.pop()
            if not self.inside:
                self.forward.leave_region()

    def make_what_needs(self, parameter: torch.Tensor) -> None:
        """The parameter is about to be updated, inside backward: what is still to be made again with it is made now."""
        if self.to_be_differentiated is not None:
            self.to_be_differentiated.make_readers(parameter)

    def begins(self, again: bool) -> None:
        """A chunk runs: each is the planned one, so its calls are counted from where the first one's were."""
        if again:
            self.calls = Counter(self._calls_before)
        else:
            self._calls_before = Counter(self.calls)
        if self.forward is not None:
            self.forward.begin_chunk(again)

    @contextmanager
    def differentiates(self, known: bool) -> Iterator[None]:
        """A chunk is differentiated: what was noted in it is not looked up any more, and a backward that a plan knows is not watched."""
        if self.forward is None:
            yield
            return
        with self.forward.after_chunk(unwatched=known):
            yield


def apply_tables(step: Step, tables: dict[str, PhaseTable]) -> Undo:
    """Hooks on the modules whose calls are watched, and a context around each loss; an empty table installs nothing."""
    with Undo.or_nothing() as undo:
        if tables:
            _watch(step, tables, undo)
    return undo


def _watch(step: Step, tables: dict[str, PhaseTable], undo: Undo) -> None:
    active = _Active()
    modules = {path: m for name, model in step.models.items() for path, m in model.named_modules(prefix=name)}
    for path in dict.fromkeys(r.module for table in tables.values() for r in table.regions if r is not None):
        if path not in modules:
            raise CannotApply(
                f"This plan makes tensors again inside the module {path!r}, which none of the step's models has: give that network to the "
                "Step as well, as in Step({'model': …, 'other': …}, …), or plan this step again."
            )
        _hook(modules[path], path, active, undo)
    elsewhere = Elsewhere(step.running) if puts_away(tables.values()) else None
    if elsewhere:
        undo.then(elsewhere.close)

    @contextmanager
    def around(phase: str) -> Iterator[None]:
        table = tables.get(phase)
        if table is None:
            yield
            return
        forward = Forward(table, elsewhere)
        with _watching(forward, active):
            yield
        active.to_be_differentiated = forward if step.running.steps_in_backward else None

    step.running.around_loss.append(around)
    undo.then(step.running.around_loss.remove, around)
    step.running.before_update.append(active.make_what_needs)
    undo.then(step.running.before_update.remove, active.make_what_needs)


def _hook(module: nn.Module, path: str, active: _Active, undo: Undo) -> None:
    undo.then(module.register_forward_pre_hook(lambda *_: active.enter(path), prepend=True).remove)
    undo.then(module.register_forward_hook(lambda *_: active.leave(path), prepend=True, always_call=True).remove)


@contextmanager
def _watching(forward: Forward, active: _Active) -> Iterator[None]:
    active.forward, active.calls = forward, Counter()
    try:
        with forward.hooks, chunks_watched_by(active):
            if None in forward.table.regions:
                forward.enter_region(None)
                active.inside.append("")  # already inside, whatever is called
            yield
        forward.tell_what_is_missing()
    finally:
        if active.inside:
            active.inside.clear()
            forward.leave_region()
        active.forward = None
        forward.forget()
