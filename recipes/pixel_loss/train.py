"""python recipes/pixel_loss/train.py --data synthetic --image-size 128 --batch-size 4 --epochs 2 [--budget 1GiB]

Trains `llm2vae`, the projection from an LLM's hidden states to image latents, by an L2 loss on the pixels a frozen decoder makes of them.
PIXEL_LOSS_CHUNK_SIZE=1 and PIXEL_LOSS_ADAPTIVE_CHUNK=false decode chunk by chunk, as documented; with --budget memfit chooses instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the recipe runs from anywhere, not only from the repository

import torch
from rich.console import Console
from torch import Tensor

import memfit
from recipes.kit.budget import Train, add_budget_flags, training_call
from recipes.kit.finite import Finite
from recipes.kit.flags import count, positive
from recipes.kit.out_of_memory import ran_out
from recipes.kit.pictures import save_grid
from recipes.kit.progress import bar
from recipes.kit.run_folder import RunFolder
from recipes.pixel_loss.data import TOKEN_PIXELS, Pictures, from_folder, synthetic
from recipes.pixel_loss.loss import Chunks, whole_loss
from recipes.pixel_loss.model import Decoder, PixelModel, load_decoder

HIDDEN = 3584  # of BAGEL's LLM
LR = 1e-3
SHOWN = 4  # pictures in a run's PNG
LARGEST = 8192  # pixels along a side: 256 times the memory of 512 × 512


def make_step(
    image_size: int = 128, batch_size: int = 4, hand_fix: bool = False, chunks: Chunks | None = None, hidden: int = HIDDEN, lr: float = LR
) -> memfit.Step:
    """One training step on made-up tokens and pixels: what memory and time depend on are their sizes only."""
    torch.manual_seed(0)
    model = PixelModel(hidden, Decoder(hand_fix=hand_fix))
    tokens = torch.randn(batch_size, (image_size // TOKEN_PIXELS) ** 2, hidden)
    batch = {"tokens": tokens, "images": torch.randn(batch_size, 3, image_size, image_size)}
    return step_of(model, batch, chunks, lr)


def step_of(model: PixelModel, batch: dict[str, Tensor], chunks: Chunks | None, lr: float) -> memfit.Step:
    """The step: the decoder and its loss are handed to memfit.chunked, so that a plan can differentiate them a few images at a time."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        decoded = chunks.loss if chunks else whole_loss
        return memfit.chunked(lambda z, x: decoded(model.decoder, z, x), model.latents(batch["tokens"]), batch["images"])

    return memfit.Step(model, loss, torch.optim.AdamW(model.llm2vae.parameters(), lr), batch)


def make_512() -> memfit.Step:
    """One image of 512 × 512."""
    return make_step(512, 1)


def make_512_four() -> memfit.Step:
    """Four images of 512 × 512."""
    return make_step(512, 4)


def make_1024() -> memfit.Step:
    """One image of 1024 × 1024."""
    return make_step(1024, 1)


def main() -> None:
    """Train as the flags say."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.image_size % TOKEN_PIXELS or not 32 <= arguments.image_size <= LARGEST:
        parser.error(f"--image-size {arguments.image_size}: it must be a multiple of {TOKEN_PIXELS}, from 32 to {LARGEST}")
    if not arguments.data and not arguments.data_dir:
        parser.error("there is nothing to train on: give --data-dir DIR with pictures, or --data synthetic")
    try:
        Run(arguments, Console()).train()
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        parser.error("memory ran out: give a --budget below what is free, or smaller --image-size, --batch-size and --images")
    except memfit.MemfitError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", choices=["synthetic"], help="pictures the decoder makes of smooth latents; nothing is needed for it")
    data.add_argument("--data-dir", type=Path, help="a folder of pictures, in it or below")
    parser.add_argument(
        "--vae", type=Path, help="the decoder's weights: FLUX's or BAGEL's ae.safetensors, or a state dict (default: fixed random)"
    )
    parser.add_argument("--image-size", type=count, default=128, help="pixels along each side (default 128; documented: 512)")
    parser.add_argument("--batch-size", type=count, default=4)
    parser.add_argument("--images", type=count, default=16, help="how many synthetic pictures (default 16)")
    parser.add_argument("--epochs", type=count, default=2)
    parser.add_argument("--lr", type=positive, help=f"default {LR}; with --resume the checkpoint's, if none is given")
    parser.add_argument("--hand-fix", action="store_true", help="the documented fix: checkpoint the decoder's two finest levels")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pixel_loss"))
    parser.add_argument("--resume", action="store_true", help="go on where the run in --output-dir stopped")
    add_budget_flags(parser)
    return parser


class Run:
    """A training run, from its flags."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.arguments, self.console = arguments, console
        chunks = Chunks.from_environment()
        torch.manual_seed(0)
        decoder = Decoder(hand_fix=arguments.hand_fix)
        if arguments.vae:
            load_decoder(decoder, arguments.vae)
        else:
            console.print(
                "No --vae: the decoder's weights are fixed random ones, so pictures only show whether the projection finds its latents."
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = PixelModel(HIDDEN, decoder)
        self.pictures = self._pictures()
        self.batch_size = min(arguments.batch_size, len(self.pictures.images))
        self.model.to(self.device)
        first = self._batch(torch.arange(self.batch_size))
        self.step = step_of(self.model, first, chunks if arguments.budget == "none" else None, arguments.lr or LR)
        self.folder = RunFolder(
            arguments.output_dir, {"llm2vae": self.model.llm2vae, "optimizer": self.step.optimizers[0]}, arguments.resume
        )

    def _pictures(self) -> Pictures:
        arguments = self.arguments
        if arguments.data_dir:
            return from_folder(arguments.data_dir, arguments.image_size, HIDDEN)
        return synthetic(arguments.images, arguments.image_size, HIDDEN, self.model.decoder)

    def _batch(self, which: Tensor) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in self.pictures.batch(which).items()}

    def train(self) -> None:
        """Every epoch: all pictures in a new order, a checkpoint, a PNG."""
        first = self.folder.resume(self.arguments.lr) if self.arguments.resume else 0
        if first >= self.arguments.epochs:
            self.console.print(f"Nothing is left to do: {first} epochs are done, and --epochs is {self.arguments.epochs}.")
            return
        train = training_call(self.step, self.arguments.budget, self.arguments.allow, self.console)
        self.folder.add("fitted", train)
        finite = Finite(self.step)
        for epoch in range(first, self.arguments.epochs):
            loss = self._epoch(epoch, train)
            finite.check(f"epoch {epoch + 1}", loss, -(-len(self.pictures.images) // self.batch_size))
            self.folder.save(epoch + 1)
            self.console.print(f"Epoch {epoch + 1}/{self.arguments.epochs} | pixel loss {loss:.6f} | PSNR {self._show(epoch):.2f} dB")

    def _epoch(self, epoch: int, train: Train) -> float:
        batches = torch.randperm(len(self.pictures.images)).split(self.batch_size)
        total = 0.0
        with bar(self.console, f"Epoch {epoch + 1}", len(batches)) as advance:
            for number, which in enumerate(batches):
                step, loss = epoch * len(batches) + number, float(train(self._batch(which)))  # type: ignore[arg-type]
                self.folder.log(step=step, epoch=epoch + 1, pixel_loss=loss)
                if step % 100 == 0:
                    self._print_gradients(self.console.print)
                advance(f"pixel loss {loss:.5f}")
                total += loss * len(which) / len(self.pictures.images)
        return total

    def _print_gradients(self, show: Callable[[str], None]) -> None:
        """The documented check that gradients reach llm2vae."""
        for name, parameter in self.model.named_parameters():
            if "llm2vae" in name and parameter.grad is not None:
                show(f"{name}: grad_norm={parameter.grad.norm().item():.6f}")

    def _show(self, epoch: int) -> float:
        """Targets above, what the projection's latents decode to below; the PSNR between them."""
        shown = self._batch(torch.arange(min(SHOWN, len(self.pictures.images))))
        with torch.no_grad():
            made = torch.cat([self.model.decoder(z) for z in self.model.latents(shown["tokens"]).split(1)])
        target = shown["images"]
        low, high = float(target.min()), float(target.max())
        save_grid(self.folder.path / f"epoch_{epoch + 1:04d}.png", torch.cat([target, made]), len(target), low, high)
        return float(10 * torch.log10((high - low) ** 2 / (made - target).pow(2).mean()))


if __name__ == "__main__":
    main()
