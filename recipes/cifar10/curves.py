"""Loss curves of the same training in several ways: update by update, from the same weights, with the same pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import memfit
from memfit.levers import LEVERS
from memfit.step.running import Part
from recipes.cifar10 import data
from recipes.cifar10.train import make_step
from recipes.cifar10.training import documented_epoch, test

BATCH, MICRO, STEPS = 128, 16, 8
INTO_THE_SECOND = 10  # updates of the second epoch, where the update that the first one lost shows


def make_documented_step(name: str) -> memfit.Step:
    """Eight micro-batches, each divided by 8: the documented loop's update, in a form that can be measured beside the others."""
    step = make_step(name, BATCH)
    step.running.split = lambda _phase, batch: [
        Part((x, y), 1 / STEPS) for x, y in zip(batch[0].chunk(STEPS), batch[1].chunk(STEPS), strict=True)
    ]
    return step


@dataclass
class Curve:
    """A training's loss at each update, how many pictures of an epoch moved a weight, and the test after one epoch."""

    losses: list[float]
    used: int
    accuracy: float
    test_loss: float


def curve(name: str, way: str, budget: str, directory: Path) -> Curve:
    """One epoch and the beginning of the next, from the same weights and with the same pictures in the same order."""
    print(f"{name}: loss curve, {way}", flush=True)
    step, images = make_step(name), data.load(directory)
    if way == "documented":
        return _documented_curve(step, images)
    train = (
        memfit.fit(step, budget, levers={"microbatch": LEVERS["microbatch"]})
        if way == "memfit"
        else lambda batch: float(step.run(batch)[""])
    )
    losses, tested = [], (0.0, 0.0)
    for epoch, loader in _epochs(images, BATCH):
        for x, y in islice(loader, INTO_THE_SECOND if epoch else None):
            loss = train((x.flip(0), y.flip(0)) if way == "backwards" else (x, y))
            assert isinstance(loss, float)
            losses.append(loss)
        tested = tested if epoch else test(step.models[""], images)[:2]
    return Curve(losses, len(images.train), *tested)


def _documented_curve(step: memfit.Step, images: data.Images) -> Curve:
    """Its losses by group of eight micro-batches; those after the last whole group belong to no update."""
    model, losses, tested = step.models[""], list[float](), (0.0, 0.0)
    for epoch, loader in _epochs(images, MICRO, drop_last=True):
        totals = [0.0]

        def tell(number: int, mean: float, totals: list[float] = totals) -> None:
            totals.append(number * mean)

        batches = islice(loader, None if epoch == 0 else INTO_THE_SECOND * STEPS)
        documented_epoch(model, batches, step.optimizers[0], STEPS, tell)
        groups = range(STEPS, len(totals), STEPS)
        losses += [(totals[end] - totals[end - STEPS]) / STEPS for end in groups]
        tested = tested if epoch else test(model, images)[:2]
    return Curve(losses, len(images.train) // BATCH * BATCH, *tested)


def _epochs(images: data.Images, batch: int, drop_last: bool = False) -> Iterator[tuple[int, DataLoader[Any]]]:
    loader = data.train_loader(images, batch, drop_last=drop_last)
    for epoch in range(2):
        data.begin_epoch(loader, epoch)
        yield epoch, loader
