"""Volumes: NIfTI, npz and npy files, or made-up heads with structure; each scaled to 0..1 and to the configured size."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data.dataset import CacheDataset
from monai.transforms.compose import Compose
from monai.transforms.transform import Transform
from torch.nn import functional as F
from torch.utils.data import DataLoader

from recipes.volume_autoencoder.config import Config

SUFFIXES = (".nii", ".nii.gz", ".npz", ".npy")
SYNTHETIC_VOLUMES = 8


class DataError(Exception):
    """What is wrong with the data, and what would be right."""


class Volume(Transform):
    """A file's path, or the number of a synthetic volume, becomes [1, X, Y, Z]. (monai caches what its own kind of transform makes.)"""

    def __init__(self, size: tuple[int, ...]) -> None:
        self.size = size

    def __call__(self, source: Path | int) -> torch.Tensor:
        """Read or made, scaled and resized."""
        return synthetic(source, self.size) if isinstance(source, int) else resized(read(source), self.size)


def read(path: Path) -> torch.Tensor:
    """One volume as [X, Y, Z]. Of an npz the array `t1` is taken, or the only one with three dimensions."""
    try:
        array = np.squeeze(_loaded(path)).astype(np.float32)
    except DataError:
        raise
    except Exception as error:  # each format has its own ways of being damaged
        raise DataError(f"{path} cannot be read as a volume: {' '.join(str(error).split()) or type(error).__name__}") from None
    if array.ndim != 3 or not array.size:
        raise DataError(f"{path} has {array.ndim} dimensions {array.shape}: a volume has three, and something in it.")
    if not np.isfinite(array).all():
        raise DataError(f"{path} holds values that are not finite: mend it, or take it out of --data-dir.")
    return torch.from_numpy(array)


def _loaded(path: Path) -> Any:
    if path.suffix == ".npz":
        return _array_in(np.load(path), path)
    if path.suffix == ".npy":
        return np.load(path)
    return np.asarray(nibabel.nifti1.Nifti1Image.from_filename(path).dataobj)


def told_by_data(error: BaseException) -> str | None:
    """What a DataError said that monai or a loader's worker has wrapped into an error of their own."""
    told = re.findall(r"DataError: (.*)", "".join(traceback.format_exception(error)))
    return str(told[-1]) if told else None


def _array_in(arrays: Any, path: Path) -> Any:
    volumes = [name for name in arrays.files if arrays[name].ndim == 3]
    if "t1" in volumes or len(volumes) == 1:
        return arrays["t1" if "t1" in volumes else volumes[0]]
    found = ", ".join(f"{name} {arrays[name].shape}" for name in arrays.files) or "nothing"
    raise DataError(f"{path} should hold one volume, named t1 or alone in three dimensions; it holds {found}.")


def resized(volume: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Intensities from the 0.5th to the 99.5th percentile become 0..1, then the whole volume takes the configured size."""
    values = volume.flatten()[:: max(1, volume.numel() // 200_000)].sort().values
    low, high = values[int(len(values) * 0.005)], values[int(len(values) * 0.995)]
    scaled = ((volume - low) / (high - low).clamp_min(1e-6)).clamp(0, 1)
    return F.interpolate(scaled[None, None], size, mode="trilinear", align_corners=False)[0]


def sized(batch: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Volumes at another resolution; as they are where they have it."""
    return batch if batch.shape[2:] == torch.Size(size) else F.interpolate(batch, list(size), mode="trilinear")


def synthetic(number: int, size: tuple[int, ...]) -> torch.Tensor:
    """A head that differs with its number: a bright shell, a body of folds inside it, two dark chambers."""
    generator = torch.Generator().manual_seed(number)
    axes = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in size), indexing="ij")
    jitter = 1 + 0.2 * (torch.rand(8, generator=generator) - 0.5)
    x, y, z = (axis * jitter[i] * 1.15 for i, axis in enumerate(axes))
    radius = (x**2 + y**2 + z**2).sqrt()
    folds = 0.5 + 0.25 * torch.sin(9 * jitter[3] * x + 4 * torch.sin(5 * y)) * torch.sin(8 * jitter[4] * y + 4 * torch.sin(6 * z))
    brain = folds * torch.sigmoid((0.75 - radius) * 30)
    shell = 0.9 * torch.exp(-(((radius - 0.9) / 0.05) ** 2))
    chambers = sum(torch.exp(-(((x + side * 0.2) / 0.12) ** 2) - (y / (0.3 * jitter[5])) ** 2 - (z / 0.2) ** 2) for side in (-1, 1))
    return (brain * (1 - 0.8 * chambers) + shell).clamp(0, 1)[None]


def sources_in(folder: Path | None) -> list[Path | int]:
    """The folder's volumes in order of their names, or the numbers of the synthetic ones."""
    if folder is None:
        return list(range(SYNTHETIC_VOLUMES))
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory: give one with {', '.join(SUFFIXES)} files.")
    found = [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIXES)]
    if not found:
        raise DataError(f"There is no volume in {folder}: it needs {', '.join(SUFFIXES)} files.")
    return list(found)


def loader_of(sources: list[Path | int], config: Config, generator: torch.Generator) -> DataLoader[torch.Tensor]:
    """Shuffled batches of all the volumes that count for one update; `cache_rate` of them stay in memory."""
    volumes = CacheDataset(sources, Compose([Volume(config.voxel_size)]), cache_rate=config.data.cache_rate, progress=False)
    return DataLoader(volumes, config.samples_a_step, shuffle=True, generator=generator, num_workers=config.data.num_workers)
