"""What the memory allocator keeps of what tensors gave back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit.ledger.timeline import live_bytes
from memfit.levers.allocator_holes import SECONDS_OF_A_CALL, HolesGivenBack, with_few_holes
from memfit.levers.glibc import give_back_at_once, of_glibc, set_variable
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.reading import Damaged, at_least, between, is_true, one_of, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.records import Ledger, Option, Process, Trace
from memfit.step import Step
from memfit.step.running import Running
from memfit.units import format_bytes

_LIKELY_HOLES, _MOST_HOLES = 0.8, 1.8  # of small blocks: replays through malloc gave 0.6 to 1.3 with what sharing a heap adds
_HOLES = 1 / 16  # of what is in use, that are left
_LEFT_BY_TRIMMING = 0.6  # of the likely slack: measured, 0 to 0.63
_CUDA_SETTINGS = ("expandable_segments:True", "max_split_size_mb:128")
_CUDA_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_MOST_THRESHOLD = 2**31 - 1  # that glibc takes

_WAYS = {
    "holes": between(0),
    "threshold": at_least(0, _MOST_THRESHOLD),
    "trim": is_true,
    "cuda": one_of(*_CUDA_SETTINGS),
    "mps": is_true,
}


def read_settings(settings: Mapping[str, Any]) -> None:
    """Of an edited file: one way to act, and no other."""
    reader({}, _WAYS)(settings)
    if len(settings) != 1:
        raise Damaged(f"it needs one of {', '.join(_WAYS)}, and has {len(settings)}")


class AllocatorLever:
    """The same tensors, and less beside them: freed memory goes back to the system, at once, where holes grow, or after each step."""

    name = "allocator"
    exactness = "bitwise"
    needs = "Linux with glibc, CUDA or MPS"
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """On a CPU thresholds and trimming, on a GPU the settings of torch's own allocator."""
        return tuple(_options(ledger))

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """The peak stays; the slack becomes what small blocks leave. For GPUs nothing is promised: nothing was measured on one."""
        trace = trace_of(ledger)
        if "holes" in option.settings:
            trace = _with_few_holes(trace, option.settings["holes"])
        elif "threshold" in option.settings:
            trace = _pinned(trace, option.settings["threshold"])
        elif "trim" in option.settings:
            slack = int(_LEFT_BY_TRIMMING * max(0, trace.process.slack_bytes))
            trace = replace(trace, process=replace(trace.process, slack_bytes=min(slack, trace.process.slack_bytes)))
        return rewritten(ledger, trace)

    def apply(self, step: Step, option: Option) -> Undo:
        """Tell the allocator of this process, and of workers it starts later."""
        with Undo.or_nothing() as undo:
            if "cuda" in option.settings:
                _refuse_cuda_in_use(option.settings["cuda"])
                set_variable(_CUDA_VARIABLE, ",".join(filter(None, (os.environ.get(_CUDA_VARIABLE), option.settings["cuda"]))), undo)
            elif "holes" in option.settings:
                _give_holes_back(step.running, option.settings["holes"], undo)
            elif "threshold" in option.settings:
                give_back_at_once(option.settings["threshold"], undo)
            else:
                call = torch.mps.empty_cache if "mps" in option.settings else _malloc_trim()
                step.running.after_step.append(call)
                undo.then(step.running.after_step.remove, call)
        return undo


def _options(ledger: Ledger) -> Iterator[Option]:
    if ledger.device == "cpu":
        name = f"holes of more than {_HOLES:.0%} given back"
        yield Option("allocator", name, "bitwise", {"holes": _HOLES}, "malloc keeps what tensors free, in pieces that may not fit")
        yield _pinned_at(2**20)
        yield Option("allocator", "trimmed after each step", "bitwise", {"trim": True}, "holes of one step are not carried into the next")
        yield _pinned_at(2**17)
    elif ledger.device == "cuda":
        for setting in _CUDA_SETTINGS:
            yield Option("allocator", setting, "bitwise", {"cuda": setting}, "untested: no such device was here")
    elif ledger.device == "mps":
        yield Option("allocator", "cache emptied after each step", "bitwise", {"mps": True}, "untested: no such device was here")


def _pinned_at(threshold: int) -> Option:
    name = f"{format_bytes(threshold)} and more given back at once"
    return Option("allocator", name, "bitwise", {"threshold": threshold}, "freed memory stays with the process otherwise")


def _with_few_holes(trace: Trace, share: float) -> Trace:
    process, seconds = with_few_holes(trace, trace.process, share), trace.step_seconds
    if seconds is not None:
        given_back = trace.process.slack_high_bytes - process.slack_high_bytes  # in every step: a guess on the safe side
        seconds += given_back / trace.fresh_bytes_a_second + len(trace.calls) * SECONDS_OF_A_CALL
    return replace(trace, process=process, step_seconds=seconds)


def _pinned(trace: Trace, threshold: int) -> Trace:
    small = replace(
        trace,
        storages=tuple(s for s in trace.storages if s.bytes < threshold),
        ops=tuple(op if op.workspace < threshold else replace(op, workspace=0) for op in trace.ops),
    )
    holes = int(live_bytes(small).max())
    seconds = trace.step_seconds
    if seconds is not None:
        large = [s.bytes for s in trace.storages if s.born >= 0] + [op.workspace for op in trace.ops]
        seconds += sum(size for size in large if size >= threshold) / trace.fresh_bytes_a_second
    return replace(trace, process=_with_holes(trace.process, holes), step_seconds=seconds)


def _with_holes(process: Process, holes: int) -> Process:
    unsure = max(0, -process.slack_low_bytes)  # of what a warm process holds beside its heap
    return replace(
        process,
        slack_bytes=min(process.slack_bytes, int(_LIKELY_HOLES * holes)),
        slack_high_bytes=min(process.slack_high_bytes, int(_MOST_HOLES * holes) + unsure),
    )


def _give_holes_back(running: Running, share: float, undo: Undo) -> None:
    around = HolesGivenBack(share).around_loss
    running.around_loss.append(around)
    undo.then(running.around_loss.remove, around)
    running.beside = lambda trace, process: with_few_holes(trace, process, share)
    undo.then(setattr, running, "beside", None)


def _malloc_trim() -> Any:
    trim = of_glibc("malloc_trim")
    return lambda: trim(0)


def _refuse_cuda_in_use(setting: str) -> None:
    if not torch.cuda.is_available():
        raise CannotApply(f"{setting} is for CUDA's allocator, and there is no CUDA device here: leave this lever out.")
    if torch.cuda.is_initialized():
        raise CannotApply(
            f"CUDA's allocator has begun its work, and {setting} counts only before: start the program with {_CUDA_VARIABLE}={setting}."
        )
