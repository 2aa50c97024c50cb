"""A frozen image decoder of the shape FLUX and BAGEL use, and the trained projection in front of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SCALE, SHIFT = 0.3611, 0.1159  # of FLUX's latents: what the decoder gets is z / SCALE + SHIFT
PATCH = 2  # latent pixels along each side of a token's patch
FINEST_LEVELS = 1  # the documented fix checkpoints i_level <= 1


def swish(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return F.silu(x)


def norm(channels: int) -> nn.GroupNorm:
    """32 groups, as everywhere in this decoder."""
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Norm, swish, convolution, twice, and a way around."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm2, self.conv2 = norm(out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if channels != out_channels:
            self.nin_shortcut = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] → [B, out_channels, H, W]."""
        h = self.conv1(swish(self.norm1(x)))
        h = self.conv2(swish(self.norm2(h)))
        out: Tensor = h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return out


class AttnBlock(nn.Module):
    """Every latent pixel attends to every other, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = self.norm(x)
        q, k, v = (part(h).flatten(2).transpose(1, 2).unsqueeze(1).contiguous() for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(x.shape)
        out: Tensor = x + self.proj_out(h)
        return out


class Upsample(nn.Module):
    """Twice as high and wide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, 2H, 2W]."""
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class Decoder(nn.Module):
    """[B, 16, H, W] latents → [B, 3, 8H, 8W] pixels. With `hand_fix`, the two finest levels are checkpointed, as documented."""

    def __init__(
        self, ch: int = 128, ch_mult: tuple[int, ...] = (1, 2, 4, 4), num_res_blocks: int = 2, z_channels: int = 16, hand_fix: bool = False
    ) -> None:
        super().__init__()
        self.num_resolutions, self.num_res_blocks, self.hand_fix = len(ch_mult), num_res_blocks, hand_fix
        width = ch * ch_mult[-1]
        self.conv_in = nn.Conv2d(z_channels, width, 3, padding=1)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.attn_1, self.mid.block_2 = ResnetBlock(width, width), AttnBlock(width), ResnetBlock(width, width)
        levels: list[nn.Module] = []
        for i_level in reversed(range(self.num_resolutions)):
            level, out = nn.Module(), ch * ch_mult[i_level]
            level.block = nn.ModuleList(ResnetBlock(width if i == 0 else out, out) for i in range(num_res_blocks + 1))
            level.attn = nn.ModuleList()
            if i_level != 0:
                level.upsample = Upsample(out)
            levels.insert(0, level)
            width = out
        self.up = nn.ModuleList(levels)
        self.norm_out, self.conv_out = norm(width), nn.Conv2d(width, 3, 3, padding=1)

    def _forward_level(self, h: Tensor, i_level: int) -> Tensor:
        level: Any = self.up[i_level]
        for block in level.block:
            h = block(h)
        if i_level != 0:
            h = level.upsample(h)
        return h

    def forward(self, z: Tensor) -> Tensor:
        """Latents to pixels."""
        mid: Any = self.mid
        h = mid.block_2(mid.attn_1(mid.block_1(self.conv_in(z / SCALE + SHIFT))))
        for i_level in reversed(range(self.num_resolutions)):
            if self.hand_fix and i_level <= FINEST_LEVELS and h.requires_grad:
                h = checkpoint(self._forward_level, h, i_level, use_reentrant=False)
            else:
                h = self._forward_level(h, i_level)
        out: Tensor = self.conv_out(swish(self.norm_out(h)))
        return out


class PixelModel(nn.Module):
    """`llm2vae`, which is trained, and the decoder, which is not."""

    def __init__(self, hidden: int, decoder: Decoder, z_channels: int = 16) -> None:
        super().__init__()
        self.z_channels = z_channels
        self.llm2vae = nn.Linear(hidden, PATCH * PATCH * z_channels)
        self.decoder = decoder.eval().requires_grad_(False)

    def latents(self, tokens: Tensor) -> Tensor:
        """[B, n², hidden] → [B, 16, 2n, 2n]: each token is a patch of the latent."""
        return unpatch(self.llm2vae(tokens), self.z_channels)


def unpatch(patches: Tensor, channels: int) -> Tensor:
    """[B, n², 2·2·C] → [B, C, 2n, 2n]."""
    side = round(patches.shape[1] ** 0.5)
    cut = patches.view(-1, side, side, PATCH, PATCH, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, side * PATCH, side * PATCH)


def patches(latents: Tensor) -> Tensor:
    """[B, C, 2n, 2n] → [B, n², 2·2·C], the other way."""
    count, channels, height, width = latents.shape
    cut = latents.view(count, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(count, -1, PATCH * PATCH * channels)


def load_decoder(decoder: Decoder, path: Path) -> None:
    """FLUX's or BAGEL's `ae.safetensors`, or a state dict saved by torch; names may begin with `decoder.`."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: --vae takes ae.safetensors, or a state dict saved by torch.")
    inside, needed = _weights_in(path), {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    missing, unknown = [name for name in needed if name not in inside], [name for name in inside if name not in needed]
    shaped = [name for name in needed if name in inside and inside[name].shape != needed[name]]
    if odd := [*missing, *unknown, *shaped]:
        counts = f"{len(missing)} tensors are missing, {len(unknown)} unknown and {len(shaped)} of another shape"
        raise ValueError(f"{path} does not hold this decoder: {counts}, {odd[0]} for one.")
    decoder.load_state_dict(inside)


def _weights_in(path: Path) -> dict[str, Tensor]:
    try:
        state = _safetensors(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        return {name.removeprefix("decoder."): tensor.float() for name, tensor in state.items() if not name.startswith("encoder.")}
    except Exception as error:  # a damaged file may be anything to a reader
        raise ValueError(f"{path} cannot be read: it is damaged, or neither safetensors nor a state dict saved by torch.") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    """The format is a length, a JSON header and the bytes: not worth a dependency."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = about["data_offsets"]
            found[name] = torch.frombuffer(data[start + first : start + last], dtype=kinds[about["dtype"]]).view(about["shape"])
    return found
