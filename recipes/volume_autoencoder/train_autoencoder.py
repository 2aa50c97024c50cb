"""python recipes/volume_autoencoder/train_autoencoder.py --config recipes/volume_autoencoder/configs/default.yaml

Trains MONAI's 3D AutoencoderKL with a discriminator and a perceptual loss, as the YAML file says. `--data-dir DIR` takes your NIfTI or npz
volumes, `--budget 4GiB` fits the training into memory with memfit, and

    memfit profile recipes/volume_autoencoder/train_autoencoder.py:make_step
    memfit plan recipes/volume_autoencoder/train_autoencoder.py:make_high_resolution --budget 4GiB

`--allow altered` may also change what is trained, as far as variants.py goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the recipe finds its neighbours from any directory

import psutil
import torch
from rich.console import Console

import memfit
from memfit.capture.process import HighWaterMark
from memfit.fitting.applying import apply_levers
from memfit.records import PlannedLever
from memfit.units import format_bytes
from recipes.kit.budget import Train, add_budget_flags, training_call
from recipes.kit.finite import Finite
from recipes.kit.flags import count, positive
from recipes.kit.out_of_memory import ran_out
from recipes.kit.pictures import save_grid
from recipes.kit.progress import bar, tree_bytes
from recipes.kit.run_folder import RunFolder, Stateful
from recipes.volume_autoencoder.config import Config, ConfigError, changed, load_config
from recipes.volume_autoencoder.data import DataError, Volume, loader_of, sized, sources_in, told_by_data
from recipes.volume_autoencoder.model import build_models, build_step
from recipes.volume_autoencoder.perceptual import WeightsError
from recipes.volume_autoencoder.variants import altered

LR = 1e-4
CONFIGS = Path(__file__).parent / "configs"


def make_step() -> memfit.Step:
    """A step that a laptop can run: the configuration of 256×256×64 on two smaller volumes."""
    return step_of("exact_4gib", voxel_size=(64, 64, 32), batch_size=2)


def make_high_resolution() -> memfit.Step:
    """256×256×64 with the discriminator and the perceptual loss."""
    return step_of("exact_4gib")


def make_default() -> memfit.Step:
    """64³, a batch of 4."""
    return step_of("default")


def make_preset_a() -> memfit.Step:
    """The guide's preset for 24 GB."""
    return step_of("preset_a")


def make_preset_b() -> memfit.Step:
    """The guide's preset for 32 GB."""
    return step_of("preset_b")


def make_preset_c() -> memfit.Step:
    """The guide's preset for 40 GB."""
    return step_of("preset_c")


def step_of(name: str, **keys: Any) -> memfit.Step:
    """A configuration's step on made-up volumes, with some of its keys changed."""
    config = changed(load_config(CONFIGS / f"{name}.yaml"), **keys)
    return made_up(config, variants={name: partial(made_up, other) for name, other in altered(config).items()})


def made_up(config: Config, **more: Any) -> memfit.Step:
    """A step on volumes that the recipe makes itself."""
    torch.manual_seed(0)
    volumes = torch.stack([Volume(config.voxel_size)(number) for number in range(config.samples_a_step)])
    return with_precision(build_step(config, volumes, **more), config)


def with_precision(step: memfit.Step, config: Config) -> memfit.Step:
    """mixed_precision: autocast in every module, and a guard that skips a step that is not finite and names the module it began in."""
    if config.device.mixed_precision:
        dtype = "float16" if torch.cuda.is_available() else "bfloat16"  # float16 is many times slower on a CPU
        apply_levers(step, [PlannedLever("precision", f"{dtype} autocast", "rounded", settings={"dtype": dtype})])
    return step


def main() -> None:
    """Read the command line and train; what the user can set right is one message and exit code 2, a budget that nothing fits 1."""
    parser = argparse.ArgumentParser(description="Train a 3D autoencoder from a YAML file.")
    parser.add_argument("--config", type=Path, required=True, help="a YAML file, as those in recipes/volume_autoencoder/configs")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", choices=["synthetic"], help="volumes that the recipe makes itself (default without --data-dir)")
    data.add_argument("--data-dir", type=Path, help="a folder of .nii, .nii.gz, .npz or .npy volumes")
    parser.add_argument("--perceptual-weights", type=Path, help="torchvision's squeezenet1_1 file; fixed random features without it")
    parser.add_argument("--epochs", type=count, default=5)
    parser.add_argument("--lr", type=positive, help=f"default {LR}; with --resume the checkpoint's, if none is given")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/volume_autoencoder"))
    parser.add_argument("--resume", action="store_true", help="go on where the run in --output-dir stopped")
    add_budget_flags(parser)
    args = parser.parse_args()
    try:
        train(args, load_config(args.config), Console())
    except (ConfigError, DataError, WeightsError) as error:
        _end(str(error), 2)
    except memfit.MemfitError as error:
        _end(str(error), error.exit_code)
    except (RuntimeError, MemoryError) as error:
        if not (told := told_by_data(error)) and not ran_out(error):
            raise
        _end(told or "Memory ran out: give a --budget below what is free, or smaller volumes or batches in the file.", 2)


def _end(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def train(args: argparse.Namespace, config: Config, console: Console) -> None:
    """All epochs, with a log row, a checkpoint and a picture after each."""
    if args.perceptual_weights and not config.autoencoder.training.use_perceptual_loss:
        raise ConfigError(f"--perceptual-weights needs autoencoder.training.use_perceptual_loss: true in {args.config}.")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources, order = sources_in(args.data_dir), torch.Generator()
    loader = loader_of(sources, config, order)
    first = next(iter(loader_of(sources, changed(config, cache_rate=0), order))).to(device)

    def build(config: Config, **more: Any) -> memfit.Step:
        models = {name: model.to(device) for name, model in build_models(config, args.perceptual_weights).items()}
        return with_precision(build_step(config, sized(first, config.voxel_size), models, args.lr or LR, loader=loader, **more), config)

    step = build(config, variants={name: partial(build, other) for name, other in altered(config).items()})
    _announce(args, config, len(sources), console)
    folder = RunFolder(args.output_dir, {}, args.resume)
    call = training_call(step, args.budget, args.allow, console, _smaller(step.batch, config))
    done, finite = _resumed(folder, step, call, args), Finite(step)
    if done >= args.epochs:
        console.print(f"Nothing is left to do: {done} epochs are done, and --epochs is {args.epochs}.")
    for epoch in range(done + 1, args.epochs + 1):
        order.manual_seed(epoch)
        row = _epoch(call, loader, step.batch, console, f"Epoch {epoch}/{args.epochs}")
        finite.check(f"epoch {epoch}", row["generator"] + row["discriminator"], len(loader))
        row |= _reconstruct(step.models["autoencoder"], step.batch[:1], args.output_dir / f"reconstruction_{epoch:04d}.png")
        folder.log(epoch=epoch, **row)
        folder.save(epoch)
        told = " | ".join(f"{name} {value:.4g}" for name, value in row.items() if name != "memory_bytes")
        console.print(f"Epoch {epoch}/{args.epochs} | {told} | {format_bytes(int(row['memory_bytes']))}")


def _resumed(folder: RunFolder, step: memfit.Step, call: Stateful, args: argparse.Namespace) -> int:
    """The number of epochs done. What is saved is known once the step is fitted: an altered one has other models."""
    generator, discriminator = step.optimizers
    folder.parts.update({name: step.models[name] for name in ("autoencoder", "discriminator")})
    folder.parts.update(optimizer=generator, optimizer_d=discriminator)
    done = folder.resume(args.lr) if args.resume else 0
    folder.add("fitted", call)
    return done


def _announce(args: argparse.Namespace, config: Config, count: int, console: Console) -> None:
    data = f"{count} volumes of {args.data_dir}" if args.data_dir else f"{count} synthetic volumes (--data-dir DIR takes yours)"
    size, training = "×".join(map(str, config.voxel_size)), config.autoencoder.training
    console.print(f"{args.config}: {data} at {size}, batch {training.batch_size} × {training.gradient_accumulation_steps}")
    if training.use_perceptual_loss and args.perceptual_weights is None:
        console.print("Perceptual loss: fixed random features, no trained ones (--perceptual-weights FILE takes SqueezeNet's).")


def _epoch(call: Train, loader: Any, like: torch.Tensor, console: Console, title: str) -> dict[str, float]:
    """Mean losses over the epoch's updates, the time it took, and the most memory: the kernel's mark, loader workers beside it.

    Volumes take the device and the size of those that the step was made with.
    """
    sums, workers, started = {"generator": 0.0, "discriminator": 0.0}, 0, time.perf_counter()
    with bar(console, title, len(loader)) as advance, HighWaterMark() as mark:
        for batch in loader:
            losses = call(sized(batch.to(like.device), like.shape[2:]))
            assert isinstance(losses, dict)  # a step with phases
            sums = {name: total + losses[name] / len(loader) for name, total in sums.items()}
            workers = max(workers, tree_bytes() - int(psutil.Process().memory_info().rss))
            advance(f"loss {losses['generator']:.4f}")
    return {**sums, "seconds": time.perf_counter() - started, "memory_bytes": mark.bytes + workers}


def _reconstruct(autoencoder: torch.nn.Module, volume: torch.Tensor, path: Path) -> dict[str, float]:
    """A picture: three middle slices, the volume's above and its reconstruction's below; and how far apart they are."""
    with torch.no_grad():
        made = autoencoder.reconstruct(volume)  # type: ignore[operator]
    save_grid(path, torch.cat([_middles(volume), _middles(made)]), columns=3)
    squared = float((made - volume).pow(2).mean())
    return {"l1": float((made - volume).abs().mean()), "psnr": -10 * torch.log10(torch.tensor(squared)).item()}


def _middles(volume: torch.Tensor) -> torch.Tensor:
    """Three slices through the middle, in squares of one size."""
    chosen: Iterator[torch.Tensor] = (volume[0].select(axis, volume.shape[axis + 1] // 2) for axis in (1, 2, 3))
    side = max(volume.shape[2:])
    return torch.stack([torch.nn.functional.interpolate(one[None], (side, side))[0] for one in chosen])


def _smaller(batch: torch.Tensor, config: Config) -> torch.Tensor:
    """Smaller volumes, on which a plan is proven whose plain step cannot be run inside the budget; large enough for the discriminator."""
    side = max(32, 4 * 2**config.autoencoder.training.discriminator.num_layers_d)
    return sized(batch, [min(n, side) for n in batch.shape[2:]])


if __name__ == "__main__":
    main()
