"""Train a class-conditional diffusion UNet, then draw pictures of every class, with and without the class:

    python recipes/conditional_unet/train.py --data synthetic --model-channels 32 --epochs 4
    python recipes/conditional_unet/train.py --data-dir cifar-10-batches-py --optimization_method factored --budget 4GiB

`--budget none` is the training as it was written; with a budget memfit fits it in place.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere: recipes are not installed

import torch
from rich.console import Console

import memfit
from memfit.units import format_bytes
from recipes.conditional_unet.conditioning import METHODS, PRESETS, OptimizationConfig
from recipes.conditional_unet.data import Images, load, synthetic
from recipes.conditional_unet.diffusion import TIMES, sample, validation_loss
from recipes.conditional_unet.model import Sizes
from recipes.conditional_unet.steps import GUIDED_DIFFUSION, build_step, get_optimal_batch_size, step_of
from recipes.kit.budget import add_budget_flags, training_call
from recipes.kit.finite import Finite
from recipes.kit.flags import count, count_or_none, positive
from recipes.kit.out_of_memory import ran_out
from recipes.kit.pictures import save_grid
from recipes.kit.progress import bar, tree_bytes
from recipes.kit.run_folder import RunFolder

LR = 2e-4
_LOW_RANK_ENDED = (
    "low_rank cannot go on: the SVD of what the weights have become does not converge. A class that repeats in a batch is enough to make "
    "its gradients NaN. Take another --optimization_method: factored is exact."
)


def make_step() -> memfit.Step:
    """The original: c⊗c and the attention maps written out, embeddings of 512, a batch a laptop can run."""
    return step_of(8)


def make_factored_step() -> memfit.Step:
    """The same with `optimization_method` factored."""
    return step_of(8, optimization=PRESETS["factored"])


def make_gpu_step() -> memfit.Step:
    """The original at the size of a GPU, batch 32: for --simulate."""
    return step_of(32, **GUIDED_DIFFUSION)


def arguments() -> argparse.ArgumentParser:
    """Every flag; those of the optimization are named as the documented keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", choices=["synthetic"], help="shapes drawn here, ten classes")
    source.add_argument("--data-dir", type=Path, help="CIFAR-10 (npz, .tar.gz, unpacked) or a folder with a folder for each class")
    parser.add_argument("--samples", type=count, default=2000, help="how many synthetic pictures (default 2000)")
    parser.add_argument("--image-size", type=count, default=32)
    parser.add_argument("--model-channels", type=count, default=128, help="embeddings have four times as many (default 128: 512)")
    parser.add_argument("--epochs", type=count, default=10)
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=count, default=32)
    batch.add_argument("--available", help="take the largest batch predicted to fit this memory, as in 4GiB")
    parser.add_argument("--lr", type=positive, help=f"default {LR}; with --resume the checkpoint's, if none is given")
    parser.add_argument("--threshold", type=float, default=0.1, help="the probability of dropping a class in training (default 0.1)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="none")
    parser.add_argument("--memory_optimization", action=argparse.BooleanOptionalAction)
    parser.add_argument("--optimization_method", choices=METHODS)
    parser.add_argument("--low_rank_ratio", type=float)
    parser.add_argument("--chunk_size", type=int)
    parser.add_argument("--use_fp16", action=argparse.BooleanOptionalAction)
    parser.add_argument("--use_checkpoint", action=argparse.BooleanOptionalAction)
    parser.add_argument("--guidance", type=float, default=2.0, help="how strongly samples follow their class (default 2)")
    parser.add_argument("--sample-steps", type=count_or_none, default=50, help="denoising steps of a sample; 0 draws none (default 50)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/conditional_unet"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output-dir")
    parser.add_argument("--seed", type=count_or_none, default=0)
    add_budget_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Read the flags and train; mistakes are told in one message."""
    parser = arguments()
    args = parser.parse_args(argv)
    if faults := _faults(args):
        parser.error("; ".join(faults))
    try:
        run(args, Console())
    except memfit.MemfitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        print(_LOW_RANK_ENDED, file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        parser.error("memory ran out: give a --budget below what is free, or smaller --batch-size, --image-size and --samples")


def _faults(args: argparse.Namespace) -> list[str]:
    faults = []
    if not args.data and not args.data_dir:
        faults.append("there is no data: give --data-dir DIR, or --data synthetic for pictures made here")
    if not 0 < args.threshold < 1:
        faults.append("--threshold is the probability of dropping a class: above 0 and below 1")
    if args.seed >= 2**64:
        faults.append("--seed must be below 2 to the 64th")
    if args.sample_steps > TIMES:
        faults.append(f"--sample-steps must be at most {TIMES}, the number of times there are")
    if args.samples < 2:
        faults.append("--samples must be at least 2: one to train on, one to judge by")
    if not math.isfinite(args.guidance):
        faults.append("--guidance must be a finite number")
    if args.model_channels % 32:
        faults.append("--model-channels must be a multiple of 32, the number of groups of its norms")
    if args.image_size % 4 or args.image_size < 8:
        faults.append("--image-size must be a multiple of 4, and at least 8")
    return faults


def optimization_config(args: argparse.Namespace) -> OptimizationConfig:
    """The preset with what the flags say instead; naming a method turns `memory_optimization` on."""
    given = {field.name: getattr(args, field.name) for field in fields(OptimizationConfig)}
    if given["optimization_method"] and given["memory_optimization"] is None:
        given["memory_optimization"] = True
    return OptimizationConfig.of(PRESETS[args.preset] | {key: value for key, value in given.items() if value is not None})


def run(args: argparse.Namespace, console: Console) -> None:
    """Data, step, epochs, pictures."""
    config = optimization_config(args)
    images = load(args.data_dir, args.image_size) if args.data_dir else synthetic(args.samples, args.image_size)
    sizes = Sizes(args.image_size, args.model_channels, attention_resolutions=(args.image_size // 2,), num_classes=len(images.classes))
    if args.available:
        args.batch_size = get_optimal_batch_size(args.available, sizes, config)
        if not args.batch_size:
            raise memfit.MemfitError(f"Not even a batch of one is predicted to fit {args.available}: give --budget, and memfit fits it.")
        console.print(f"batch size {args.batch_size}: the largest predicted to fit {args.available}")
    torch.manual_seed(args.seed)
    first = next(images.batches(args.batch_size, torch.arange(images.training)))
    step = build_step(sizes, config, first, args.threshold, args.lr or LR, device=device())
    folder = RunFolder(args.output_dir, {"model": step.models[""], "optimizer": step.optimizers[0]}, args.resume)
    done = folder.resume(args.lr) if args.resume else 0
    console.print(f"{len(images.x)} pictures of {len(images.classes)} classes, optimization_method {config.method}")
    _train(args, images, step, folder, done, console)
    if args.sample_steps:
        console.print(f"samples: {_draw(args, images, step, folder.path)}")


def _train(args: argparse.Namespace, images: Images, step: memfit.Step, folder: RunFolder, done: int, console: Console) -> None:
    if done >= args.epochs:
        return
    train, finite = training_call(step, args.budget, args.allow, console), Finite(step)
    folder.add("fitted", train)
    for epoch in range(done, args.epochs):
        started, losses, order = time.perf_counter(), [], torch.randperm(images.training)
        with bar(console, f"epoch {epoch + 1}/{args.epochs}", -(-images.training // args.batch_size)) as advance:
            for batch in images.batches(args.batch_size, order):
                loss = train({name: tensor.to(device()) for name, tensor in batch.items()})
                assert isinstance(loss, float)
                losses.append(loss * len(batch["y"]))
                advance(f"loss {loss:.4f}")
        mean = sum(losses) / images.training
        finite.check(f"epoch {epoch + 1}", mean, len(losses))
        validation = validation_loss(step.models[""], images, args.batch_size, args.threshold, one_by_one=args.budget != "none")
        row: dict[str, Any] = {"epoch": epoch + 1, "loss": mean, "validation": validation}
        folder.log(**row, seconds=round(time.perf_counter() - started, 1), memory_bytes=tree_bytes())
        folder.save(epoch + 1)
        console.print(
            f"epoch {epoch + 1}/{args.epochs}: loss {row['loss']:.4f}, validation {validation:.4f}, "
            f"{time.perf_counter() - started:.1f} s, {format_bytes(tree_bytes())}"
        )


def device() -> torch.device:
    """A card, or the CPU; only the CPU was ever tried."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _draw(args: argparse.Namespace, images: Images, step: memfit.Step, folder: Path) -> Path:
    """A row of four for each class, and a last one without any; inside a budget picture by picture."""
    model, each = step.models[""], 4
    at_once = each if args.budget == "none" else 1
    noise = torch.randn(each, 3, args.image_size, args.image_size, generator=torch.Generator().manual_seed(args.seed)).to(device())
    made = []
    for number in (*range(len(images.classes)), None):
        for part in noise.split(at_once):
            y = None if number is None else torch.full((len(part),), number, device=device())
            made.append(sample(model, y, part, args.sample_steps, args.guidance))
    return save_grid(folder / "samples.png", torch.cat(made), columns=each, low=-1.0)


if __name__ == "__main__":
    main()
