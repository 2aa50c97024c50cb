"""A 3D VAE for radar voxels, then latent diffusion in its latent space, then new volumes from noise.

    python recipes/radar_vae/train_latent_diffusion.py --mode train_vae --vae_type ultra_lightweight --batch_size 1 \\
        --gradient_accumulation_steps 8 --use_amp --vae_epochs 100 --dataset_dir DIR
    python recipes/radar_vae/train_latent_diffusion.py --mode train_ldm --vae_ckpt runs/radar_vae/vae/last.pt --dataset_dir DIR
    python recipes/radar_vae/train_latent_diffusion.py --mode sample --vae_ckpt runs/radar_vae/vae/last.pt \\
        --ldm_ckpt runs/radar_vae/ldm/last.pt

`--data synthetic` in place of `--dataset_dir DIR` makes data of its own. `--budget 4GiB` lets memfit fit the training into 4 GiB, whatever
the type; `memfit profile recipes/radar_vae/train_latent_diffusion.py:make_step` shows where the memory goes.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere, and not only where `recipes` is

import numpy as np
import torch
from rich.console import Console

import memfit
from recipes.kit.budget import Original, add_budget_flags, training_call
from recipes.kit.finite import Finite
from recipes.kit.flags import count, count_or_none, positive
from recipes.kit.out_of_memory import ran_out
from recipes.kit.pictures import save_grid
from recipes.kit.progress import bar
from recipes.kit.run_folder import RunFolder
from recipes.radar_vae.data import DataError, Grid, Volumes, length_of, open_data
from recipes.radar_vae.diffusion import LatentUNet, one_by_one_loss, sample_latents
from recipes.radar_vae.losses import Perceptual3DLoss
from recipes.radar_vae.model import CHANNELS, GRID, REDUCTION, VAE3D, VAE_TYPES, latent_shape, make_vae, type_of
from recipes.radar_vae.stages import (
    EpochOrder,
    Facts,
    Stage,
    accumulate,
    epochs_done,
    judged,
    ldm_step,
    loader_of,
    one_by_one,
    parts_of,
    vae_step,
)

LR, SMALLEST = 1e-4, "ultra_lightweight"


def make_step(
    vae_type: str = "lightweight", batch: int = 4, grid: Grid = (8, 64, 64), amp: bool = False, checkpoint: bool = False
) -> memfit.Step:
    """A VAE's step in a size for a laptop; the ultra-lightweight type is offered as what it is, another model."""
    models = {"vae": make_vae(vae_type, checkpoint), "perceptual": Perceptual3DLoss()}
    small = {SMALLEST: lambda: make_step(SMALLEST, batch, grid, amp, checkpoint)}
    voxels = torch.rand(batch, CHANNELS, *grid)
    return vae_step(models, voxels, amp=amp, variants={} if vae_type == SMALLEST else small)


def make_documented_step() -> memfit.Step:
    """The step that did not fit: standard, batch 8, the whole grid. Too large for most machines: plan it, or profile it with --simulate."""
    return make_step("standard", 8, GRID)


def make_ldm_step() -> memfit.Step:
    """The second stage's step at the documented latent size."""
    return ldm_step(LatentUNet(), torch.randn(8, *latent_shape(GRID)))


def train_vae(args: argparse.Namespace, console: Console, device: torch.device) -> None:
    """The first stage."""
    train, val = open_data(args.data, args.dataset_dir, args.grid, args.max_samples)
    torch.manual_seed(args.seed)
    loader, order, batch = _loader(train, args)

    def build(vae_type: str, **more: Any) -> memfit.Step:
        models = {"vae": make_vae(vae_type, args.use_checkpoint).to(device), "perceptual": Perceptual3DLoss().to(device)}
        return vae_step(models, batch, args.lr or LR, args.use_amp, loader=loader, **more)

    step = build(args.vae_type, variants={} if args.vae_type == SMALLEST else {SMALLEST: lambda: build(SMALLEST)})
    folder = RunFolder(args.output_dir / "vae", {}, args.resume)
    call = _call(step, args, console)
    vae = cast(VAE3D, step.models["vae"])  # with --allow altered it may be the smallest type by now
    folder.parts |= parts_of(step, facts=Facts(vae_type=type_of(vae), grid=list(args.grid)))
    if (first := epochs_done(folder, args, args.vae_epochs, console)) is None:
        return
    folder.add("fitted", call)
    shown = [train[0], *(val[n] for n in range(min(3, length_of(val))))]

    def draw(path: Path) -> None:
        made = [reconstructed(vae, volume[None].to(device))[0] for volume in shown]
        save_volumes(path, [*shown, *made], columns=len(shown))

    stage = Stage("VAE", call, loader, order, judged(val, one_by_one(step), args.batch_size), draw, Finite(step))
    stage.run(folder, first, args.vae_epochs, console)


def train_ldm(args: argparse.Namespace, console: Console, device: torch.device) -> None:
    """The second stage, on the frozen VAE's latents: they are made once, and the VAE is gone before training begins."""
    vae, grid = load_vae(args.vae_ckpt, device)
    train, val = (latents_of(vae, volumes, console) for volumes in open_data(args.data, args.dataset_dir, grid, args.max_samples))
    del vae
    torch.manual_seed(args.seed)
    unet = LatentUNet().to(device)
    latents = list(unet.standardise(unet.fit_scale(train)))
    loader, order, batch = _loader(latents, args)
    step = ldm_step(unet, batch, args.lr or LR, args.use_amp, loader)
    folder = RunFolder(args.output_dir / "ldm", parts_of(step, facts=Facts(grid=list(grid))), args.resume)
    if (first := epochs_done(folder, args, args.ldm_epochs, console)) is None:
        return
    latents[:] = unet.standardise(train)  # after a resume by the statistics of the run's beginning, whatever volumes there are now
    folder.add("fitted", call := _call(step, args, console))
    validate = judged(list(unet.standardise(val)), partial(one_by_one_loss, unet), args.batch_size)
    stage = Stage("LDM", call, loader, order, validate, lambda path: None, Finite(step))
    stage.run(folder, first, args.ldm_epochs, console)


def sample(args: argparse.Namespace, console: Console, device: torch.device) -> None:
    """New volumes: a picture of all, and the voxels of each."""
    vae, grid = load_vae(args.vae_ckpt, device)
    unet = LatentUNet().to(device)
    unet.load_state_dict(_checkpoint(args.ldm_ckpt, "--ldm_ckpt", "model")["model"])
    torch.manual_seed(args.seed)
    latents = sample_latents(unet, (args.num_samples, *latent_shape(grid)))
    with torch.no_grad():
        volumes = [vae.decode(latent[None])[0].cpu() for latent in latents]
    path = save_volumes(args.output_dir / "samples.png", volumes, columns=4)
    np.savez_compressed(path.with_suffix(".npz"), voxels=torch.stack(volumes).numpy())
    console.print(f"{len(volumes)} volumes in {path} and {path.with_suffix('.npz').name}")


def load_vae(path: str | None, device: torch.device) -> tuple[VAE3D, Grid]:
    """A trained VAE, frozen, and the grid it was trained on."""
    state = _checkpoint(path, "--vae_ckpt", "vae")
    vae = make_vae(state["facts"]["vae_type"]).to(device)
    vae.load_state_dict(state["vae"])
    z, y, x = state["facts"]["grid"]
    return vae.requires_grad_(False), (z, y, x)


def _checkpoint(path: str | None, flag: str, part: str) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        raise DataError(f"{flag} {path or 'is missing, and'} is no file: give the last.pt or best.pt of a finished stage.")
    try:
        state = torch.load(path, weights_only=True)
        names = list(state)
    except Exception as error:  # a damaged file may be anything to the unpickler, whose own advice is for other cases
        raise DataError(f"{flag} {path} cannot be read: it is damaged, or no checkpoint. Give a stage's last.pt or best.pt.") from error
    if not {part, "facts"} <= set(names):
        raise DataError(f"{flag} {path} was saved by another stage or program: it has {', '.join(map(str, names))}.")
    return dict(state)


@torch.no_grad()
def latents_of(vae: VAE3D, volumes: Volumes, console: Console) -> torch.Tensor:
    """The latent of every volume, one after the other."""
    device, latents = vae.from_latent.weight.device, []
    with bar(console, "latents", length_of(volumes)) as advance:
        for number in range(length_of(volumes)):
            latents.append(vae.latent_of(volumes[number][None].to(device)).cpu())
            advance("")
    return torch.cat(latents)


@torch.no_grad()
def reconstructed(vae: VAE3D, voxels: torch.Tensor) -> torch.Tensor:
    """What becomes of voxels on their way through the latent, without noise."""
    return vae.decode(vae.latent_of(voxels)).cpu()


def save_volumes(path: Path, volumes: list[torch.Tensor], columns: int) -> Path:
    """Occupancy seen from above: the maximum over z."""
    return save_grid(path, torch.stack([volume[:1].amax(1) for volume in volumes]), columns)


def _loader(samples: Any, args: argparse.Namespace) -> tuple[Any, EpochOrder, torch.Tensor]:
    """The training loader, what sets its order, and a first batch. A batch is what one optimizer step sees: all parts of it."""
    order, size = EpochOrder(samples), args.batch_size * args.gradient_accumulation_steps
    first = torch.stack([samples[number] for number in range(min(size, len(samples)))])
    return loader_of(samples, size, args.num_workers, order), order, first


def corner_of(volumes: torch.Tensor) -> torch.Tensor:
    """A corner of each volume, for a proof where one whole volume does not fit the budget. A multiple of what the latent is smaller by."""
    z, y, x = (max(reduction, size // 4 // reduction * reduction) for size, reduction in zip(volumes.shape[2:], REDUCTION, strict=True))
    return volumes[:, :, :z, :y, :x].contiguous()


def _call(step: memfit.Step, args: argparse.Namespace, console: Console) -> Original | memfit.Fitted:
    if args.budget == "none" and args.gradient_accumulation_steps > 1:
        accumulate(step, args.batch_size)
    return training_call(step, args.budget, args.allow, console, smaller_batch=corner_of(step.batch))


def parser() -> argparse.ArgumentParser:
    """The documented flags, and what a small machine needs besides."""
    flags = argparse.ArgumentParser(description="Train a 3D VAE on radar voxels, then latent diffusion, then sample.", allow_abbrev=False)
    flags.add_argument("--mode", required=True, choices=["train_vae", "train_ldm", "sample"])
    flags.add_argument("--vae_type", default="standard", choices=list(VAE_TYPES))
    flags.add_argument("--batch_size", type=count, default=8)
    flags.add_argument("--gradient_accumulation_steps", type=count, default=1)
    flags.add_argument("--use_amp", action="store_true", help="bfloat16 autocast")
    flags.add_argument("--use_checkpoint", action="store_true", help="torch's checkpoint around every residual block")
    flags.add_argument("--vae_epochs", type=count, default=100)
    flags.add_argument("--ldm_epochs", type=count, default=100)
    data = flags.add_mutually_exclusive_group()
    data.add_argument("--dataset_dir", "--data-dir", help="a folder of voxels, or an .npz of radar points")
    data.add_argument("--data", choices=["synthetic"], help="data made here")
    flags.add_argument(
        "--max_samples", type=count, help="use so many volumes for training, evenly spread, and a quarter as many to validate"
    )
    flags.add_argument("--grid", type=count, nargs=3, default=GRID, metavar=("Z", "Y", "X"), help="voxels along each axis (32 128 128)")
    flags.add_argument("--num_workers", type=count_or_none, default=1)
    flags.add_argument("--lr", type=positive, help=f"default {LR}; with --resume the checkpoint's, if none is given")
    flags.add_argument("--seed", type=count_or_none, default=0)
    flags.add_argument("--vae_ckpt", metavar="FILE", help="the first stage's checkpoint, for train_ldm and sample")
    flags.add_argument("--ldm_ckpt", metavar="FILE", help="the second stage's checkpoint, for sample")
    flags.add_argument("--num_samples", type=count, default=8)
    flags.add_argument("--output-dir", type=Path, default=Path("runs/radar_vae"))
    flags.add_argument("--resume", action="store_true", help="go on where the run in --output-dir stopped")
    add_budget_flags(flags)
    return flags


def main() -> None:
    """Read the flags and run a stage."""
    flags = parser()
    args = flags.parse_args()
    args.grid = tuple(args.grid)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        {"train_vae": train_vae, "train_ldm": train_ldm, "sample": sample}[args.mode](args, Console(), device)
    except (DataError, memfit.MemfitError) as error:
        flags.exit(getattr(error, "exit_code", 2), f"{error}\n")
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        flags.exit(2, "Memory ran out: give a --budget below what is free, or a smaller --batch_size or --grid.\n")


if __name__ == "__main__":
    main()
