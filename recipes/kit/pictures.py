"""Tensors as PNG files."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image


def save_grid(path: Path, images: torch.Tensor, columns: int = 8, low: float = 0.0, high: float = 1.0) -> Path:
    """[N, C, H, W] (one or three channels) as a grid; `low` is black, `high` is white. Small pictures are enlarged to 64 pixels."""
    pixels = ((images.detach().float().cpu() - low) / (high - low)).clamp(0, 1)
    pixels = pixels.repeat_interleave(scale := max(1, 64 // pixels.shape[-2]), -2).repeat_interleave(scale, -1)
    columns = min(columns, len(pixels))
    pixels = torch.nn.functional.pad(pixels, (1, 1, 1, 1), value=1.0)
    empty = -len(pixels) % columns
    pixels = torch.cat([pixels, pixels.new_ones(empty, *pixels.shape[1:])])
    rows = [torch.cat(list(row), dim=-1) for row in pixels.split(columns)]
    whole = torch.cat(rows, dim=-2).expand(3, -1, -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((whole.permute(1, 2, 0) * 255).round().byte().contiguous().numpy()).save(path)
    return path
