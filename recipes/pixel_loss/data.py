"""Images and the hidden states an LLM might have for them: from a folder of pictures, or made up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from recipes.pixel_loss.model import Decoder, patches

KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TOKEN_PIXELS = 16  # along each side of the square of pixels a token stands for


@dataclass(frozen=True)
class Pictures:
    """`images` [N, 3, S, S] from -1 to 1, and `tokens` [N, (S / 16)², hidden]."""

    images: Tensor
    tokens: Tensor

    def batch(self, which: Tensor) -> dict[str, Tensor]:
        """Some of them, as the step takes them."""
        return {"tokens": self.tokens[which], "images": self.images[which]}


def from_folder(folder: Path, size: int, hidden: int) -> Pictures:
    """Every picture in a folder and below, cut to a square. Tokens are a fixed random map of what each token's square shows."""
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in KINDS) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"{folder} holds no pictures: --data-dir needs a folder with {', '.join(KINDS)} files in it or below.")
    images = torch.stack([_read(file, size) for file in files])
    squares = F.unfold(images, TOKEN_PIXELS, stride=TOKEN_PIXELS).transpose(1, 2)
    return Pictures(images, as_hidden_states(squares, hidden))


def synthetic(count: int, size: int, hidden: int, decoder: Decoder) -> Pictures:
    """What the decoder makes of smooth latents, which the tokens carry: a projection that gets the loss to zero exists."""
    made = torch.Generator().manual_seed(0)
    side = size // 8
    coarse = torch.randn(count, 16, max(2, side // 4), max(2, side // 4), generator=made)
    latents = F.interpolate(coarse, size=(side, side), mode="bilinear")
    with torch.no_grad():
        images = torch.cat([decoder(one) for one in latents.split(1)])
    return Pictures(images, as_hidden_states(patches(latents), hidden))


def as_hidden_states(features: Tensor, hidden: int) -> Tensor:
    """A fixed random map into an LLM's width: it stands for the LLM, which is not part of this recipe."""
    fixed = torch.randn(features.shape[-1], hidden, generator=torch.Generator().manual_seed(1))
    states: Tensor = features @ fixed / features.shape[-1] ** 0.5
    return states


def _read(file: Path, size: int) -> Tensor:
    try:
        with Image.open(file) as image:
            square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
    except Exception as error:  # each format has its own way of being damaged
        raise ValueError(f"{file} cannot be read as a picture: mend it, or take it out of --data-dir.") from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 127.5 - 1
