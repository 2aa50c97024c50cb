"""Train two classifiers on CIFAR-10, in the documented way or fitted into a budget.

python recipes/cifar10/train.py --epochs 10 --batch-size 16 --accumulation-steps 8 --model h2q --data-dir DIR
python recipes/cifar10/train.py --epochs 10 --model h2q --data-dir DIR --budget 900MiB
python recipes/cifar10/train.py --epochs 2 --data synthetic
memfit plan recipes/cifar10/train.py:make_step --budget 900MiB
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the recipe runs from anywhere

import torch
from rich.console import Console
from torch.utils.data import DataLoader, default_collate

import memfit
from recipes.cifar10 import data, screen
from recipes.cifar10.model import make_model, parameter_count
from recipes.cifar10.training import SoFar, Tell, Watch, class_loss, documented_epoch, fitted_epoch, follow_cosine, swapped_bytes, test
from recipes.kit.budget import Train, add_budget_flags, training_call
from recipes.kit.finite import Finite
from recipes.kit.flags import count, count_or_none, positive
from recipes.kit.out_of_memory import ran_out
from recipes.kit.pictures import save_grid
from recipes.kit.progress import tree_bytes
from recipes.kit.run_folder import RunFolder

LR = 1e-3


def make_step(name: str = "h2q", batch: int = 128, depth: int = 4, workers: int = 0) -> memfit.Step:
    """The original's step: 128 pictures at once. `workers` makes it the loader's step, whose processes count."""
    torch.manual_seed(0)
    model = make_model(name, depth)
    pictures = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    loader = data.train_loader(data.synthetic(), batch, workers) if workers else None
    return memfit.Step(model, class_loss, torch.optim.AdamW(model.parameters(), 1e-3), pictures, loader=loader)


def make_baseline_step() -> memfit.Step:
    """The same of the plain network."""
    return make_step("baseline")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The documented flags, and those every recipe has."""
    parser = argparse.ArgumentParser(description="CIFAR-10 on a small machine, in the documented way or fitted into a budget.")
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument("--batch-size", type=count, default=16, help="pictures in memory at once (default 16)")
    parser.add_argument("--accumulation-steps", type=count, default=8, help="micro-batches to one update (default 8)")
    parser.add_argument("--model", choices=("h2q", "baseline", "both"), default="both")
    parser.add_argument("--lr", type=positive, help=f"default {LR}; with --resume the checkpoint's, if none is given")
    parser.add_argument("--depth", type=count, default=4, help="mixing blocks of h2q (default 4)")
    parser.add_argument("--num-workers", type=count_or_none, default=0, help="processes of the loader; the original had 2 (default 0)")
    parser.add_argument("--data", choices=("synthetic",), help="pictures made here, when there is no CIFAR-10")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies, as downloaded or as npz")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoints in --output-dir")
    add_budget_flags(parser)
    chosen = parser.parse_args(argv)
    if (chosen.data is None) == (chosen.data_dir is None):
        parser.error("where are the pictures? Give --data-dir DIR with CIFAR-10 in it, or --data synthetic.")
    names = ("h2q", "baseline") if chosen.model == "both" else (chosen.model,)
    if chosen.resume and not any((chosen.output_dir / name / "last.pt").exists() for name in names):
        parser.error(f"there is nothing to resume: {chosen.output_dir} has no checkpoint of {' or '.join(names)}.")
    return chosen


def make_loader(chosen: argparse.Namespace, images: data.Images) -> DataLoader[Any]:
    """Micro-batches for the documented loop, without the last one if it is smaller, as documented; whole batches for memfit."""
    update = chosen.batch_size * chosen.accumulation_steps
    if chosen.budget != "none":
        return data.train_loader(images, update, chosen.num_workers)
    if chosen.accumulation_steps > 1 and update > len(images.train):
        raise data.DataError(
            f"An update takes --batch-size {chosen.batch_size} × --accumulation-steps {chosen.accumulation_steps} pictures, and there are "
            f"{len(images.train)}: the documented loop would never make one. Take fewer of them."
        )
    return data.train_loader(images, chosen.batch_size, chosen.num_workers, drop_last=chosen.accumulation_steps > 1)


class Training:
    """One model's training, from the flags to the last row of its log."""

    def __init__(self, name: str, chosen: argparse.Namespace, images: data.Images) -> None:
        torch.manual_seed(0)  # each model starts from the same weights, whichever was trained before it
        self.name, self.chosen, self.images, self.so_far = name, chosen, images, SoFar()
        self.model = make_model(name, chosen.depth).to(device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), chosen.lr or LR)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, chosen.epochs)
        self.loader = make_loader(chosen, images)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule, "so_far": self.so_far}
        again = chosen.resume and (chosen.output_dir / name / "last.pt").exists()
        self.folder = RunFolder(chosen.output_dir / name, parts, again)
        self.done = self.folder.resume() if again else 0
        if told := follow_cosine(self.schedule, chosen.epochs, chosen.lr):
            print(told)

    def step(self) -> memfit.Step:
        """What memfit is given: the whole batch of one update, and the loader, whose workers count."""
        size = self.loader.batch_size or 1
        sample = default_collate([self.loader.dataset[number] for number in range(min(size, len(self.images.train)))])
        return memfit.Step(self.model, class_loss, self.optimizer, sample, loader=self.loader)

    def run(self, console: Console) -> None:
        """Every epoch that is still to be trained; the checkpoint, the log and the line of each."""
        chosen = self.chosen
        count, batch, steps = parameter_count(self.model), chosen.batch_size, chosen.accumulation_steps
        screen.model_begins(self.name, count, str(device()), batch, steps, self.done)
        needed = chosen.budget != "none" and self.done < chosen.epochs
        step = self.step()
        fitted = training_call(step, chosen.budget, chosen.allow, console) if needed else None
        if fitted:
            self.folder.add("fitted", fitted)
        tracemalloc.start()  # after the planning, which it would slow down
        every, finite = 10 if fitted else 10 * steps, Finite(step)
        for epoch in range(self.done, chosen.epochs):
            print(f"\nEpoch {epoch + 1}/{chosen.epochs}")
            data.begin_epoch(self.loader, epoch)
            with Watch() as watch:
                loss = self._epoch(fitted, screen.teller(len(self.loader), every, watch))
            finite.check(f"epoch {epoch + 1}", loss, len(self.loader))
            self.schedule.step()
            self._finish(epoch, loss, watch)

    def _epoch(self, fitted: Train | None, tell: Tell) -> float:
        if fitted is not None:
            return fitted_epoch(fitted, self.loader, tell)
        return documented_epoch(self.model, self.loader, self.optimizer, self.chosen.accumulation_steps, tell)

    def _finish(self, epoch: int, loss: float, watch: Watch) -> None:
        accuracy, test_loss, wrong = test(self.model, self.images)
        screen.epoch_ends(loss, accuracy, test_loss, watch)
        so_far = self.so_far
        so_far.seconds, so_far.accuracy = so_far.seconds + watch.seconds, accuracy
        so_far.memory_bytes = max(so_far.memory_bytes, watch.memory_bytes)
        losses = {"train_loss": loss, "test_accuracy": accuracy, "test_loss": test_loss}
        self.folder.log(epoch=epoch + 1, **losses, memory_bytes=watch.memory_bytes, seconds=watch.seconds)
        self.folder.save(epoch + 1)
        if wrong.any():
            save_grid(self.folder.path / "mistakes.png", self.images.test[wrong][:32].float(), high=255.0)


def device() -> torch.device:
    """The documents' Apple GPU, another one, or the CPU; only the CPU was ever tried."""
    return torch.accelerator.current_accelerator() or torch.device("cpu") if torch.accelerator.is_available() else torch.device("cpu")


def main(argv: list[str] | None = None) -> int:
    """Train what was asked for, then show the table."""
    chosen = arguments(argv)
    initial, swapped = tree_bytes(), swapped_bytes()
    screen.banner(str(device()), chosen.batch_size, chosen.accumulation_steps, chosen.epochs, initial)
    try:
        images = data.load(chosen.data_dir) if chosen.data_dir else data.synthetic()
        names = ["h2q", "baseline"] if chosen.model == "both" else [chosen.model]
        screen.loaded(images, len(make_loader(chosen, images)))
        rows = [_trained(name, chosen, images) for name in names]
    except (data.DataError, memfit.MemfitError) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, memfit.MemfitError) else 2
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        print("Memory ran out: give a --budget below what is free, or a smaller --batch-size.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nInterrupted: --resume goes on after the last whole epoch in {chosen.output_dir}.", file=sys.stderr)
        return 130
    screen.results(rows, initial, swapped_bytes() - swapped)
    return 0


def _trained(name: str, chosen: argparse.Namespace, images: data.Images) -> tuple[str, int, SoFar]:
    """What the final table says of it; all else is gone before the next model begins."""
    tracemalloc.stop()
    training = Training(name, chosen, images)
    training.run(Console())
    return name, parameter_count(training.model), training.so_far


if __name__ == "__main__":
    sys.exit(main())
