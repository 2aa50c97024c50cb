"""torch.compile: fused kernels that keep and move less, of the whole model or of its repeated blocks."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.errors import MemfitError
from memfit.levers.lever import CannotApply, trace_of
from memfit.levers.microbatch import MicroBatch
from memfit.levers.microbatch import read_settings as read_split
from memfit.levers.reading import Damaged, are_words, at_least, between, reader
from memfit.levers.rewriting import rewritten
from memfit.levers.undo import Undo
from memfit.records import Ledger, Op, Option, Saved, Storage, Trace
from memfit.step import Step, device_of
from memfit.torch_private import compiler, compiler_settings

_FUNCTORCH = {"force_non_lazy_backward_lowering": True}  # at the first backward, none of these settings would hold any more
_DRAWING_AS_EAGER = {"fallback_random": True}  # left to itself, the compiler draws other numbers, which is another training
_BUDGETS = (1.0, 0.5, 0.2, 0.05)  # of what the compiler would keep by itself
_PARTS = (2, 4)  # of a batch, in which an option is tried as well


def _is_split(settings: Mapping[str, Any]) -> bool:
    try:
        read_split(settings)
    except Damaged as damage:
        raise Damaged(f"of its micro-batches {damage}") from None
    return True


_MEASURED = {
    "measured_peak_bytes": at_least(0),
    "measured_seconds": between(0),
    "measured_slowdown": between(0),
    "compile_seconds": between(0),
    "run_steps": at_least(1),
}
read_settings = reader({"modules": are_words, "budget": between(0, 1)}, {"split": _is_split, **_MEASURED})


class CompileLever:
    """Counts only once it was measured: nobody can tell beforehand what a compiler makes of a model, alone or beside another lever."""

    name = "compile"
    exactness = "reordered"
    needs = "a C++ compiler (CPU) or Triton (CUDA), and a measurement: memfit.fitting.compiling"
    excludes = frozenset(  # saved's dispatch mode would not let compiled code run; beside the others nothing was measured
        {"saved", "microbatch", "chunk", "precision", "attention", "outer_product", "optimizer", "loader", "allocator", "architecture"}
    )

    def __init__(self, measured: Sequence[Option] = ()) -> None:
        self._measured = tuple(measured)

    def candidates(self, ledger: Ledger) -> Sequence[Option]:
        """What could be tried: the whole models or their repeated blocks, with and without a budget for what is kept for backward."""
        return tuple(_options(trace_of(ledger))) if compiler_found(ledger.device) else ()

    def in_parts(self, option: Option, ledger: Ledger) -> Iterator[Option]:
        """A candidate with the batch in micro-batches, where these draw nothing: no compiled code runs while draws are replayed."""
        for split in MicroBatch().options(ledger):
            exact = split.exactness == "reordered" and not split.settings["draws"]
            if exact and -(-ledger.batch_size // split.settings["size"]) in _PARTS:
                yield replace(option, name=f"{option.name}, {split.name}", settings=option.settings | {"split": split.settings})

    def options(self, ledger: Ledger) -> Sequence[Option]:
        """Those that were measured and proven; `memfit.fitting.compiling.measured_compile` does both."""
        return self._measured

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        """What was measured and put into the option's settings."""
        peak, seconds = (option.settings.get(name) for name in ("measured_peak_bytes", "measured_seconds"))
        if peak is None or seconds is None:
            raise MemfitError(
                f"What {option.name!r} takes is not known yet: a compiler's memory cannot be predicted. Let "
                "memfit.fitting.compiling.measured_compile run it, and plan with the lever it gives."
            )
        return rewritten(ledger, replace(_as_one_op(trace_of(ledger), peak), step_seconds=seconds))

    def apply(self, step: Step, option: Option) -> Undo:
        """Compiled forwards in place of the modules' own; the modules, and their keys in a state_dict, stay what they are."""
        device = device_of(step)
        if not compiler_found(device):
            raise CannotApply(f"torch.compile needs {'Triton' if device == 'cuda' else 'a C++ compiler'}, and none was found: install one.")
        named = {path: m for name, model in step.models.items() for path, m in model.named_modules(prefix=name)}
        if missing := [path for path in option.settings["modules"] if path not in named]:
            raise CannotApply(f"The model has no module {missing[0]!r} to compile: profile the step again, and choose from its options.")
        with Undo.or_nothing() as undo:
            if split := option.settings.get("split"):
                undo.then(MicroBatch().apply(step, Option("microbatch", "", option.exactness, split)))
            for path in option.settings["modules"]:
                _compile(named[path], option.settings["budget"], undo)
        return undo


class CompiledForward:
    """A module's forward, compiled at its first call; `compile_seconds` tells how long that call took."""

    def __init__(self, forward: Callable[..., Any], budget: float) -> None:
        functools.update_wrapper(self, forward)
        self.compile_seconds: float | None = None
        self._compiled = torch.compile(forward, backend=_inductor(budget))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's answer."""
        started = time.perf_counter()
        out = self._compiled(*args, **kwargs)
        if self.compile_seconds is None:
            self.compile_seconds = time.perf_counter() - started
        return out


def compile_seconds(step: Step) -> float:
    """What compiling this step has taken so far."""
    forwards = (m.__dict__.get("forward") for model in step.models.values() for m in model.modules())
    return sum(f.compile_seconds or 0.0 for f in forwards if isinstance(f, CompiledForward))


def compiler_found(device: str) -> bool:
    """Whether torch.compile can work on a device of this machine."""
    if device != "cpu":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "c++"))


def _options(trace: Trace) -> Iterator[Option]:
    wholes = [model.name for model in trace.models if model.trained]
    blocks = _repeated_blocks([call.module for call in trace.calls])
    for words, modules in (("the whole model", wholes), (f"each of {len(blocks)} blocks", blocks)):
        for budget in _BUDGETS if modules else ():
            name = words if budget == 1.0 else f"{words}, budget {budget}"
            yield Option("compile", name, "reordered", {"modules": modules, "budget": budget}, "fused kernels keep and move less")


def _repeated_blocks(paths: Sequence[str]) -> list[str]:
    """The outermost modules that stand in a row of their kind: "layers.0", "layers.1", …"""
    rows: dict[str, set[str]] = {}
    for path in paths:
        if found := re.match(r"(.*?)(?:^|\.)\d+(?=\.|$)", path):
            rows.setdefault(found.group(1), set()).add(found.group(0))
    deepest = [row for row in rows.values() if len(row) > 1]
    return sorted({path for row in deepest for path in row}, key=lambda path: [int(n) if n.isdigit() else n for n in path.split(".")])


@functools.cache
def _inductor(budget: float) -> Callable[..., Any]:
    """Inductor under a budget: blocks of one kind share what is compiled, but never with another budget."""

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        partitioner, inductor = compiler_settings()
        with _with(partitioner, _FUNCTORCH | {"activation_memory_budget": budget}), _with(inductor, _DRAWING_AS_EAGER):
            return compiler()(graph, inputs)

    return compiled


def _with(config: Any, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Those of the settings that this torch has."""
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    return config.patch(**known) if known else nullcontext()


def _compile(module: nn.Module, budget: float, undo: Undo) -> None:
    if compiler() is None:
        raise CannotApply(f"torch {torch.__version__} does not give its compiler under the name we know: leave out compile.")
    if budget != 1.0 and not hasattr(compiler_settings()[0], "activation_memory_budget"):
        raise CannotApply("This version of torch has no activation_memory_budget: compile without a budget.")
    own = module.__dict__
    undo.then(own.__setitem__, "forward", own["forward"]) if "forward" in own else undo.then(own.pop, "forward", None)
    own["forward"] = CompiledForward(module.forward, budget)


def _as_one_op(trace: Trace, peak: int) -> Trace:
    """A step of which only the peak is known: what is there from the start, and the rest at once."""
    fixed = tuple(s for s in trace.storages if s.born < 0)
    rest = Storage(max(0, peak - sum(s.bytes for s in fixed)), 0, 0)
    op = Op("memfit.compiled_step.default", "forward", "", "", "", (), (len(fixed),))
    return replace(trace, ops=(op,), storages=(*fixed, rest), saved=(Saved(len(fixed), 0, 0),), calls=())
