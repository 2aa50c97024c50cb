"""The L2 pixel loss, decoded whole or in the documented chunks, which keep every chunk's activations until backward."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from recipes.kit.out_of_memory import ran_out

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "")


@dataclass
class Chunks:
    """`PIXEL_LOSS_CHUNK_SIZE` images are decoded at a time; `PIXEL_LOSS_ADAPTIVE_CHUNK` halves that when memory runs out."""

    size: int = 1
    adaptive: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Chunks:
        """As documented: 1 and false unless set. ValueError says what is wrong with a value."""
        size, adaptive = environment.get("PIXEL_LOSS_CHUNK_SIZE") or "1", environment.get("PIXEL_LOSS_ADAPTIVE_CHUNK", "false").lower()
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"PIXEL_LOSS_CHUNK_SIZE is {size!r}: it must be a whole number of images, 1 or more.")
        if adaptive not in (*_TRUE, *_FALSE):
            raise ValueError(f"PIXEL_LOSS_ADAPTIVE_CHUNK is {adaptive!r}: it must be true or false.")
        return cls(int(size), adaptive in _TRUE)

    def loss(self, decoder: nn.Module, latents: Tensor, images: Tensor) -> Tensor:
        """The mean over all images. No chunk is differentiated before the last one is decoded: this saves next to nothing."""
        total, start = latents.new_zeros(()), 0
        while start < len(latents):
            part = slice(start, start + self.size)
            try:
                loss = whole_loss(decoder, latents[part], images[part])
            except RuntimeError as error:
                if not (self.adaptive and self.size > 1 and ran_out(error)):
                    raise
                self.size //= 2
                continue  # here the failed chunk's tensors are gone; inside `except` the traceback still holds them
            total = total + loss * (len(images[part]) / len(images))
            start += self.size
        return total


def whole_loss(decoder: nn.Module, latents: Tensor, images: Tensor) -> Tensor:
    """Decode, compare: the mean over these images."""
    return F.mse_loss(decoder(latents), images)
