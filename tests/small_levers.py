"""Tiny levers for tests: right ones, and ones that are wrong in the ways levers go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.levers import Undo
from memfit.records import Ledger, Option, Plan, PlannedLever
from memfit.step import Step
from memfit.step.batches import batch_size, map_tensors
from memfit.step.fingerprint import fingerprint
from memfit.step.running import Part


@dataclass(frozen=True)
class SmallLever:
    """A lever that only knows how to act."""

    name: str
    exactness: str
    act: Callable[[Step, Undo], None]
    needs: str = ""
    excludes: frozenset[str] = frozenset()

    def options(self, ledger: Ledger) -> tuple[Option, ...]:
        return ()

    def rewrite(self, ledger: Ledger, option: Option) -> Ledger:
        return ledger

    def apply(self, step: Step, option: Option) -> Undo:
        undo = Undo()
        self.act(step, undo)
        return undo


def plan_of(step: Step, *levers: SmallLever) -> Plan:
    planned = tuple(PlannedLever(lever.name, lever.name, lever.exactness) for lever in levers)
    classes = [lever.exactness for lever in levers]
    exactness = "reordered" if "reordered" in classes else "bitwise"
    return Plan(True, 2**30, 0, 0, None, exactness, planned, step=fingerprint(step))


def _split_by(
    weigh: Callable[[int, int, int], float], drop: Callable[[int], bool] = lambda number: False, around: Any = None
) -> Callable[[Step, Undo], None]:
    """Pieces of two samples; `weigh(samples, all samples, pieces)` is what one counts for."""

    def act(step: Step, undo: Undo) -> None:
        def split(phase: str, batch: Any) -> list[Part]:
            whole = batch_size(batch)
            starts = range(0, whole, 2)
            pieces = [map_tensors(lambda t, at=at: t[at : at + 2], batch) for at in starts]
            shares = [weigh(batch_size(piece), whole, len(pieces)) for piece in pieces]
            kept = [n for n in range(len(pieces)) if not drop(n)]
            more = {"around": lambda: around(step)} if around else {}
            return [Part(pieces[n], shares[n], **more) for n in kept]

        assert step.running.split is None
        step.running.split = split
        undo.then(setattr, step.running, "split", None)

    return act


def _around(context: Callable[[Step], AbstractContextManager[Any]]) -> Callable[[Step, Undo], None]:
    def act(step: Step, undo: Undo) -> None:
        enter = lambda phase: context(step)  # noqa: E731
        step.running.around_loss.append(enter)
        undo.then(step.running.around_loss.remove, enter)

    return act


def _hooked(change: Callable[[torch.Tensor], Any]) -> Callable[[Step, Undo], None]:
    def act(step: Step, undo: Undo) -> None:
        for p in next(iter(step.models.values())).parameters():
            if p.requires_grad:
                undo.then(p.register_hook(change).remove)
                return

    return act


def _checkpointed(step: Step, undo: Undo) -> None:
    """Every submodule with parameters and without children of its own is run again in backward."""
    for model in step.models.values():
        for module in model.modules():
            if not list(module.children()) and any(p.requires_grad for p in module.parameters()) and not list(module.buffers()):
                forward = module.forward

                def again(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

                module.forward = again  # type: ignore[method-assign]
                undo.then(module.__dict__.pop, "forward")


@contextmanager
def _reseeded(step: Step) -> Iterator[None]:
    torch.manual_seed(4321)
    yield


@contextmanager
def _counted_twice(step: Step) -> Iterator[None]:
    """As a recompute that runs BatchNorm's update a second time."""
    norms = [m for model in step.models.values() for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    yield
    with torch.no_grad():
        for norm in norms:
            norm.num_batches_tracked.add_(1)


@contextmanager
def _averaged_twice(step: Step) -> Iterator[None]:
    norms = [m for model in step.models.values() for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [m.running_mean.clone() for m in norms]
    yield
    with torch.no_grad():
        for norm, old in zip(norms, before, strict=True):
            norm.running_mean = norm.running_mean + 0.9 * (norm.running_mean - old)  # the same batch's mean once more


@contextmanager
def _clipped_parts(step: Step) -> Iterator[None]:
    yield
    torch.nn.utils.clip_grad_norm_([p for model in step.models.values() for p in model.parameters()], 1e-2)


def _stale(step: Step, undo: Undo) -> None:
    """An offload that hands out what it saved for the step before: right in the first step, wrong ever after."""
    older: list[dict[int, torch.Tensor]] = [{}]

    @contextmanager
    def context(step: Step) -> Iterator[None]:
        now: dict[int, torch.Tensor] = {}
        past = older[0]

        def pack(t: torch.Tensor) -> Any:
            if isinstance(t, nn.Parameter) or not t.is_floating_point():
                return t.detach()
            now[len(now)] = t.detach().clone()
            return len(now) - 1

        def unpack(kept: Any) -> torch.Tensor:
            return kept if isinstance(kept, torch.Tensor) else past.get(kept, now[kept])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        older[0] = now

    _around(context)(step, undo)


def _modified(step: Step, undo: Undo) -> None:
    """A packing that loses the last bits of what it keeps."""

    def context(step: Step) -> Any:
        lossy = lambda t: t.bfloat16() if t.dtype is torch.float32 and not isinstance(t, nn.Parameter) else t.detach()  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(lossy, lambda t: t.float() if t.dtype is torch.bfloat16 else t)

    _around(context)(step, undo)


def _detached(step: Step, undo: Undo) -> None:
    """A part of the model whose graph is cut: what comes before it learns nothing."""
    children = [m for model in step.models.values() for m in model.children() if any(True for _ in m.parameters())]
    undo.then(children[-1].register_forward_pre_hook(lambda module, args: tuple(a.detach() for a in args)).remove)


def _slower(step: Step, undo: Undo) -> None:
    for group in step.optimizers[0].param_groups:
        undo.then(group.__setitem__, "lr", group["lr"])
        group["lr"] *= 0.999


def _fused(step: Step, undo: Undo) -> None:
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            for name, value in (("fused", True), ("foreach", False)):
                undo.then(group.__setitem__, name, group[name])
                group[name] = value


def _raising(step: Step, undo: Undo) -> None:
    @contextmanager
    def context(step: Step) -> Iterator[None]:
        yield
        raise RuntimeError("a saved tensor was lost")

    _around(context)(step, undo)


@contextmanager
def _nothing(step: Step) -> Iterator[None]:
    yield


def _by_samples(samples: int, whole: int, pieces: int) -> float:
    return samples / whole


NOTHING = SmallLever("nothing", "bitwise", _around(_nothing))
CHECKPOINT = SmallLever("checkpoint", "bitwise", _checkpointed)
SPLIT = SmallLever("split", "reordered", _split_by(_by_samples))
FUSED = SmallLever("fused", "reordered", _fused)
RIGHT = (NOTHING, CHECKPOINT, SPLIT, FUSED)

WRONG = {
    lever.name: lever
    for lever in (
        SmallLever("other masks", "bitwise", _around(_reseeded)),
        SmallLever("counted twice", "bitwise", _around(_counted_twice)),
        SmallLever("averaged twice", "bitwise", _around(_averaged_twice)),
        SmallLever("unweighted", "reordered", _split_by(lambda samples, whole, pieces: 1 / pieces)),
        SmallLever("lost part", "reordered", _split_by(_by_samples, drop=lambda number: number == 1)),
        SmallLever("light parts", "reordered", _split_by(lambda samples, whole, pieces: 0.95 * samples / whole)),
        SmallLever("clipped parts", "reordered", _split_by(_by_samples, around=_clipped_parts)),
        SmallLever("stale", "bitwise", _stale),
        SmallLever("modified", "bitwise", _modified),
        SmallLever("detached", "bitwise", _detached),
        SmallLever("weakened", "bitwise", _hooked(lambda g: g * 0.75)),
        SmallLever("slower", "bitwise", _slower),
        SmallLever("raising", "bitwise", _raising),
    )
}
