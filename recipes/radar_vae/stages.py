"""What the two stages share: a training step, how it is judged, and the loop over epochs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

import memfit
from memfit.levers.precision_running import FiniteGuard
from memfit.step import device_of
from memfit.step.running import Part
from recipes.kit.budget import Train
from recipes.kit.finite import Finite
from recipes.kit.progress import bar
from recipes.kit.run_folder import RunFolder, Stateful
from recipes.radar_vae.codebook import VQVAE3D, EMACodebook
from recipes.radar_vae.data import DataError
from recipes.radar_vae.diffusion import LatentUNet, diffusion_loss
from recipes.radar_vae.losses import Perceptual3DLoss, vae_loss
from recipes.radar_vae.model import VAE3D

Models = dict[str, nn.Module]


class EpochOrder(Sampler[int]):
    """Another order every epoch, the same after a resume."""

    def __init__(self, samples: Sized) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Facts:
    """What a checkpoint must agree on with the run that reads it."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def state_dict(self) -> dict[str, Any]:
        """The facts."""
        return self.facts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint of another kind."""
        for name, value in self.facts.items():
            if state.get(name) != value:
                raise DataError(
                    f"The checkpoint was made with {name} {state.get(name)}, and this run has {value}: they cannot go on together."
                )


@dataclass
class Best:
    """The lowest validation loss until now: a run that goes on must not take a worse model for the best."""

    loss: float = float("inf")

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.loss = state["loss"]


@dataclass
class Stage:
    """One training, ready to run. `draw(path)` writes pictures of what the model can do by now."""

    title: str
    train: Train
    loader: DataLoader[Any]
    order: EpochOrder
    validate: Callable[[], float]
    draw: Callable[[Path], None]
    finite: Finite

    def run(self, folder: RunFolder, first: int, epochs: int, console: Console) -> None:
        """Epoch by epoch: train, judge, log, draw, save."""
        folder.add("best", best := Best())
        for epoch in range(first, epochs):
            loss = self._epoch(epoch, console)
            self.finite.check(f"epoch {epoch + 1}", loss, len(self.loader))
            validation = self.validate()
            folder.log(epoch=epoch + 1, loss=f"{loss:.6f}", val_loss=f"{validation:.6f}")
            console.print(f"{self.title} epoch {epoch + 1}/{epochs} | loss {loss:.5f} | val loss {validation:.5f}")
            self.draw(folder.path / f"epoch_{epoch + 1:04d}.png")
            better, best.loss = validation < best.loss, min(validation, best.loss)
            folder.save(epoch + 1)
            if better:
                folder.save(epoch + 1, "best.pt")

    def _epoch(self, epoch: int, console: Console) -> float:
        self.order.epoch, total, samples = epoch, 0.0, 0
        with bar(console, f"{self.title} {epoch + 1}", len(self.loader)) as advance:
            for batch in self.loader:
                loss = cast(float, self.train(batch))
                total, samples = total + loss * len(batch), samples + len(batch)
                advance(f"loss {loss:.4f}")
        return total / samples


def epochs_done(folder: RunFolder, args: argparse.Namespace, epochs: int, console: Console) -> int | None:
    """Where the run goes on; None, and a word about it, where all its epochs are done."""
    done = folder.resume(args.lr) if args.resume else 0
    if done < epochs:
        return done
    console.print(f"Nothing is left to do: {done} epochs are done, and {epochs} were asked for.")
    return None


def vae_step(models: Models, batch: torch.Tensor, learning_rate: float = 1e-4, amp: bool = False, **more: Any) -> memfit.Step:
    """One step of the VAE; a VQ-VAE's codes are moved by an optimizer of their own."""
    vae = cast(VAE3D, models["vae"])
    optimizers: list[Optimizer] = []
    if isinstance(vae, VQVAE3D):
        optimizers.append(EMACodebook([vae.codebook]))
    followed = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    optimizers.insert(0, torch.optim.AdamW([p for p in vae.parameters() if id(p) not in followed], learning_rate))

    def loss(models: Models, voxels: torch.Tensor) -> torch.Tensor:
        return vae_loss(cast(VAE3D, models["vae"]), cast(Perceptual3DLoss, models["perceptual"]), voxels, amp)

    return _guarded(memfit.Step(models, loss, optimizers, batch, **more), amp)


def ldm_step(unet: LatentUNet, batch: torch.Tensor, learning_rate: float = 2e-4, amp: bool = False, loader: Any = None) -> memfit.Step:
    """One step of the latent diffusion, on latents as the diffusion sees them."""

    def loss(unet: LatentUNet, latents: torch.Tensor) -> torch.Tensor:
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=amp):
            return diffusion_loss(unet, latents)

    return _guarded(memfit.Step(unet, loss, torch.optim.AdamW(unet.parameters(), learning_rate), batch, loader=loader), amp)


def _guarded(step: memfit.Step, amp: bool) -> memfit.Step:
    """Half precision may give a NaN where float32 gives none: that step is skipped, and the module named in which it began."""
    if amp:
        step.running.guard = FiniteGuard(step, device_of(step), torch.bfloat16)
    return step


def accumulate(step: memfit.Step, part: int) -> memfit.Step:
    """The documented accumulation: the optimizer steps once for several parts, each weighted by its samples (the last may be smaller)."""

    def split(_phase: str, batch: Any) -> Iterator[Part]:
        return (Part(samples, len(samples) / len(batch)) for samples in batch.split(part))

    step.running.split = split
    return step


def loader_of(samples: Dataset[Any], batch: int, workers: int, order: EpochOrder | None = None) -> DataLoader[Any]:
    """As documented: nothing pinned, workers that end with the epoch. Its own generator, so that it takes no number from the training."""
    return DataLoader(
        samples, batch, sampler=order, num_workers=workers, pin_memory=False, persistent_workers=False, generator=torch.Generator()
    )


def judged(samples: Any, loss: Callable[[torch.Tensor], float], batch: int) -> Callable[[], float]:
    """The mean loss over other samples, with the same noise every time; training's random numbers stay where they are."""
    loader = loader_of(samples, batch, workers=0)

    @torch.no_grad()
    def validate() -> float:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return sum(loss(part) * len(part) for part in loader) / len(samples)

    return validate


def one_by_one(step: memfit.Step) -> Callable[[torch.Tensor], float]:
    """The VAE's loss of a batch from its samples, one at a time: a batch that is trained in parts would not fit as a whole here either."""

    def loss(batch: torch.Tensor) -> float:
        assert step.loss is not None
        return sum(float(step.loss(step.model, sample)) for sample in batch.split(1)) / len(batch)

    return loss


def parts_of(step: memfit.Step, **more: Stateful) -> dict[str, Stateful]:
    """What a checkpoint holds."""
    models = {name or "model": model for name, model in step.models.items() if name != "perceptual"}
    optimizers = {f"optimizer{number or ''}": optimizer for number, optimizer in enumerate(step.optimizers)}
    return {**models, **optimizers, **more}
