"""An epoch in the documented way and in memfit's, the test, and what a run remembers of itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from memfit.capture.process import HighWaterMark, give_back_free_memory
from recipes.cifar10.data import TEST_BATCH, Images, normalised
from recipes.kit.budget import Train
from recipes.kit.progress import children_bytes, tree_bytes

Tell = Callable[[int, float], None]  # so many batches done, the mean loss until now


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, the mean over the batch."""
    device = next(model.parameters()).device
    return F.cross_entropy(model(batch[0].to(device)), batch[1].to(device))


def documented_epoch(model: nn.Module, loader: Iterable[Any], optimizer: Optimizer, steps: int, tell: Tell, cleaning: bool = True) -> float:
    """The documented loop as it was written, the micro-batches after the last whole group included: they are computed and thrown away.

    `cleaning` is its fourth strategy, `del` and emptying the cache; without, a batch's results live until the next ones replace them.
    """
    total, seen, device = 0.0, 0, next(model.parameters()).device
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(loader, 1):
        outputs = model(inputs.to(device))
        loss = F.cross_entropy(outputs, targets.to(device))
        total, seen = total + loss.item() * len(inputs), seen + len(inputs)
        loss = loss / steps
        loss.backward()
        if number % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        if cleaning:
            del inputs, targets, outputs, loss
            if number % 100 == 0:
                empty_cache(device)
        tell(number, total / seen)
    return total / seen


def fitted_epoch(call: Train, loader: Iterable[Any], tell: Tell) -> float:
    """Whole batches, which memfit takes in parts; the last one, smaller, counts as one more update."""
    total, seen = 0.0, 0
    for number, batch in enumerate(loader, 1):
        loss = call(batch)
        assert isinstance(loss, float)  # one phase
        total, seen = total + loss * len(batch[0]), seen + len(batch[0])
        tell(number, total / seen)
    return total / seen


def empty_cache(device: torch.device) -> None:
    """What the documents do on MPS; on a CPU the next thing to it: malloc gives back what it keeps."""
    {"mps": torch.mps.empty_cache, "cuda": torch.cuda.empty_cache}.get(device.type, give_back_free_memory)()


def follow_cosine(schedule: CosineAnnealingLR, epochs: int, rate: float | None) -> str:
    """A run that goes on for another number of epochs, or with another first rate, follows that cosine from here on. What to say of it.

    A loaded schedule is the saved run's: beyond its end its rate would begin at 0, and swing up and down.
    """
    first = rate or schedule.base_lrs[0]
    if (schedule.T_max, schedule.base_lrs[0]) == (epochs, first):
        return ""
    before = f"{schedule.T_max} epochs from {schedule.base_lrs[0]:g}"
    schedule.T_max, schedule.base_lrs = epochs, [first] * len(schedule.base_lrs)
    now = first * (1 + math.cos(math.pi * min(schedule.last_epoch, epochs) / epochs)) / 2
    for group in schedule.optimizer.param_groups:
        group["lr"], group["initial_lr"] = now, first
    return f"The run was begun with {before}: from here on its rate follows the cosine of {epochs} epochs from {first:g}, now {now:.3g}."


@torch.no_grad()
def test(model: nn.Module, images: Images) -> tuple[float, float, torch.Tensor]:
    """Share of the test pictures classed rightly, their mean loss, and which ones were wrong."""
    model.eval()
    device, scores = next(model.parameters()).device, []
    for start in range(0, len(images.test), TEST_BATCH):
        scores.append(model(normalised(images.test[start : start + TEST_BATCH]).to(device)).cpu())
    model.train()
    found = torch.cat(scores)
    wrong = found.argmax(1) != images.test_labels
    return 1 - float(wrong.float().mean()), float(F.cross_entropy(found, images.test_labels)), wrong


@dataclass
class SoFar:
    """What the final table needs of epochs that were trained before a resume; a part of the checkpoint."""

    seconds: float = 0.0
    accuracy: float = 0.0
    memory_bytes: int = 0

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.__dict__.update(state)


class Watch:
    """An epoch's seconds, the most the process tree held (workers counted), and the bytes that the machine swapped meanwhile."""

    def __init__(self) -> None:
        self.seconds, self.memory_bytes, self.swapped_bytes = 0.0, 0, 0
        self._mark, self._workers = HighWaterMark(), 0

    def __enter__(self) -> Watch:
        self._mark.__enter__()
        self._started, self._swapped = time.perf_counter(), swapped_bytes()
        return self

    def __exit__(self, *exc: object) -> None:
        self._mark.__exit__(*exc)
        self.seconds = time.perf_counter() - self._started
        self.memory_bytes = self._mark.bytes + self._workers
        self.swapped_bytes = swapped_bytes() - self._swapped

    def look(self) -> int:
        """What the tree holds now; workers have no high-water mark that could be reset, so they are looked at here."""
        self._workers = max(self._workers, children_bytes())
        return tree_bytes()


def swapped_bytes() -> int:
    """What the whole machine has written to swap and read from it since it was started."""
    swap = psutil.swap_memory()
    return int(swap.sin) + int(swap.sout)
