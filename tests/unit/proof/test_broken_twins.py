"""The levers themselves, each with one thing broken in what it really does: on real networks the proof tells the twins apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import Step, Verdict
from memfit.levers import LEVERS, Lever, Undo
from memfit.levers.chunk import Chunk
from memfit.levers.microbatch import MicroBatch
from memfit.levers.saved import SavedLever, elsewhere, table_option
from memfit.levers.saved.line import line_of
from memfit.levers.saved.table import DISK
from memfit.ops.spill import Spill, Spilled
from memfit.records import Option, PlannedLever
from memfit.step.running import Part
from quick_ledgers import seen
from small_levers import FUSED, SmallLever, plan_of


def gpt2() -> Step:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager"))  # with its dropout of a tenth
    return Step(net, lambda m, t: m(t, labels=t).loss, torch.optim.AdamW(net.parameters()), torch.randint(0, 50, (4, 32)))


def pictures(norm: Callable[[int], nn.Module]) -> Step:
    block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.SiLU(), nn.Dropout(0.2))
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), block, nn.Conv2d(16, 3, 3, padding=1))
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), torch.optim.AdamW(net.parameters()), torch.randn(4, 3, 16, 16))


def with_batch_norm() -> Step:
    return pictures(nn.BatchNorm2d)


def with_group_norm() -> Step:
    return pictures(lambda channels: nn.GroupNorm(4, channels))


def decoded() -> Step:
    """A decoder and its loss behind memfit.chunked, dropout and all."""
    decoder = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Dropout(0.2), nn.Linear(128, 64)).requires_grad_(False)
    net = nn.ModuleDict({"project": nn.Linear(16, 32), "decoder": decoder})

    def loss(m: Any, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return memfit.chunked(lambda z, x: F.mse_loss(m["decoder"](z), x), m["project"](b["code"]), b["pixels"])

    return Step(net, loss, torch.optim.AdamW(net["project"].parameters()), {"code": torch.randn(8, 16), "pixels": torch.randn(8, 64)})


def on_disk(step: Step) -> Option:
    """Every result that autograd keeps."""
    trace = seen(step).trace
    assert trace is not None
    return table_option(trace, dict.fromkeys(line_of(trace).made, DISK), "all on disk")


def halves(step: Step) -> Option:
    return next(option for option in LEVERS["microbatch"].options(seen(step)) if option.settings["size"] == 2)


def chunks(step: Step) -> Option:
    return next(option for option in LEVERS["chunk"].options(seen(step)) if option.settings["size"] == 2)


class NeverWrittenAgain(Spill):
    """A place in its file that was written to once keeps what was written there, step after step."""

    def __init__(self, directory: str | None = None) -> None:
        super().__init__(directory)
        self._written: set[int] = set()

    def _write(self, spilled: Spilled) -> None:
        if spilled.offset not in self._written:
            self._written.add(spilled.offset)
            super()._write(spilled)


class StaleOnDisk(SavedLever):
    def apply(self, step: Step, option: Option) -> Undo:
        undo = Undo()
        undo.then(setattr, elsewhere, "Spill", elsewhere.Spill)
        elsewhere.Spill = NeverWrittenAgain  # type: ignore[misc]
        undo.then(super().apply(step, option))
        return undo


class WithOtherParts(MicroBatch):
    """What is done with the parts it made."""

    def __init__(self, change: Callable[[list[Part]], list[Part]]) -> None:
        self._change = change

    def apply(self, step: Step, option: Option) -> Undo:
        undo = super().apply(step, option)
        split = step.running.split
        assert split is not None
        step.running.split = lambda phase, batch: self._change(list(split(phase, batch)))
        return undo


def lighter(parts: list[Part]) -> list[Part]:
    return [*parts[:-1], replace(parts[-1], share=0.95 * parts[-1].share)]


class LastChunkDetached(Chunk):
    def apply(self, step: Step, option: Option) -> Undo:
        undo, count, calls = super().apply(step, option), -(-step.batch_size // option.settings["size"]), [0]

        def cut(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            calls[0] += 1
            return args if calls[0] % count else tuple(a.detach() for a in args)

        undo.then(step.models[""].get_submodule("decoder").register_forward_pre_hook(cut).remove)
        return undo


TWINS: list[tuple[str, Callable[[], Step], Callable[[Step], Option], Lever, str]] = [
    ("stale on disk", gpt2, on_disk, StaleOnDisk(), "a step later"),
    ("stale on disk", with_batch_norm, on_disk, StaleOnDisk(), "a step later"),
    ("a lighter part", gpt2, halves, WithOtherParts(lighter), "the gradient of"),
    ("a lighter part", with_group_norm, halves, WithOtherParts(lighter), "the gradient of"),
    ("a lost part", gpt2, halves, WithOtherParts(lambda parts: parts[1:]), "the gradient of"),
    ("a lost part", with_group_norm, halves, WithOtherParts(lambda parts: parts[1:]), "the gradient of"),
    ("the last chunk detached", decoded, chunks, LastChunkDetached(), "the gradient of project"),
]


def judged(step: Step, option: Option, *more: Lever) -> Verdict:
    """With a right lever beside it."""
    rows = [PlannedLever(option.lever, option.name, option.exactness, settings=option.settings), *plan_of(step, FUSED).levers]
    known = {**LEVERS, FUSED.name: FUSED, **{lever.name: lever for lever in more}}
    return memfit.verify(step, replace(plan_of(step, FUSED), levers=tuple(rows)), levers=known)


@pytest.mark.parametrize(("make", "option_of", "twin", "what"), [row[1:] for row in TWINS], ids=[f"{r[0]}-{r[1].__name__}" for r in TWINS])
def test_a_broken_twin_is_caught_and_the_lever_itself_passes(
    make: Callable[[], Step], option_of: Callable[[Step], Option], twin: Lever, what: str
) -> None:
    step = make()
    option = option_of(step)
    assert option.exactness in ("bitwise", "reordered")  # random numbers are the plain step's
    verdict = judged(step, option, twin)
    assert not verdict.equivalent and verdict.culprit == option.lever and what in verdict.worst.what
    assert judged(step, option).equivalent


def _checkpointed(places: Sequence[int], **options: Any) -> Callable[[Step, Undo], None]:
    """These children of the block are run again in backward by torch's own checkpointing."""

    def act(step: Step, undo: Undo) -> None:
        for module in (step.models[""].get_submodule(f"1.{place}") for place in places):
            forward = module.forward

            def again(x: torch.Tensor, forward: Any = forward) -> Any:
                return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False, **options)

            module.forward = again  # type: ignore[method-assign]
            undo.then(module.__dict__.pop, "forward")

    return act


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (_checkpointed([1]), "buffer 1.1."),
        (_checkpointed([3], preserve_rng_state=False), "the gradient of"),
    ],
    ids=["BatchNorm counted again", "dropout with other masks"],
)
def test_checkpointing_what_may_not_run_again_is_caught(act: Callable[[Step, Undo], None], what: str) -> None:
    step = with_batch_norm()
    wrong, right = SmallLever("wrong", "bitwise", act), SmallLever("right", "bitwise", _checkpointed([0, 2]))
    verdict = memfit.verify(step, plan_of(step, right, wrong, FUSED), levers={lever.name: lever for lever in (right, wrong, FUSED)})
    assert not verdict.equivalent and verdict.culprit == "wrong" and what in verdict.worst.what
    assert memfit.verify(step, plan_of(step, right, FUSED), levers={lever.name: lever for lever in (right, FUSED)}).equivalent
