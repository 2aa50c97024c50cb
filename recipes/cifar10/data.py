"""CIFAR-10 as it is downloaded, as an npz file, or made here; crops and flips; a loader whose samples do not depend on its workers.

A directory may hold `cifar-10-python.tar.gz`, what comes out of it (`cifar-10-batches-py/`, or its files `data_batch_1` …
`test_batch`), or an npz file with x_train, y_train, x_test, y_test: uint8 images [N, 32, 32, 3] and labels 0 to 9.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

CLASSES, TEST_BATCH = 10, 32
_PAD = 4
_MEAN, _DEVIATION = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1), torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)
_ARCHIVE, _FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
_TRAIN, _TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]


class DataError(Exception):
    """Data that is not there, or not CIFAR-10; what was looked for and the way out."""


@dataclass(frozen=True)
class Images:
    """Pictures [N, 3, 32, 32] of bytes and their classes [N]; `origin` says in words where they come from."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor
    origin: str


def load(directory: Path) -> Images:
    """The first of the known forms that the directory has; the npz or the archive itself may be named, too."""
    images = _load(directory)
    for pictures, labels in ((images.train, images.train_labels), (images.test, images.test_labels)):
        if not len(pictures) or len(labels) != len(pictures) or not 0 <= int(labels.min()) <= int(labels.max()) < CLASSES:
            raise DataError(f"{images.origin} has {len(pictures)} pictures with {len(labels)} labels, and needs one of 0 to 9 for each.")
    return images


def _load(directory: Path) -> Images:
    if directory.is_file():
        return _from_file(directory)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory: give the one that holds CIFAR-10, or --data synthetic.")
    for folder in (directory / _FOLDER, directory):
        if (folder / _TRAIN[0]).is_file():
            return _from_batches(_reader(folder), str(folder))
    if (directory / _ARCHIVE).is_file():
        return _from_archive(directory / _ARCHIVE)
    for path in sorted(directory.glob("*.npz")):
        if found := _from_npz(path):
            return found
    raise DataError(
        f"{directory} has no CIFAR-10: neither {_ARCHIVE} (from https://www.cs.toronto.edu/~kriz/cifar.html), nor {_FOLDER}/, "
        "nor an npz file with x_train, y_train, x_test, y_test. Name another directory, or give --data synthetic."
    )


def _from_file(path: Path) -> Images:
    if path.suffix != ".npz":
        return _from_archive(path)
    if found := _from_npz(path):
        return found
    raise DataError(f"{path} has no x_train, y_train, x_test, y_test: give an npz file with all four, or --data synthetic.")


def _reader(folder: Path) -> Callable[[str], bytes]:
    return lambda name: (folder / name).read_bytes()


def _from_archive(path: Path) -> Images:
    try:
        with tarfile.open(path) as archive:
            held = {Path(member.name).name: archive.extractfile(member) for member in archive.getmembers() if member.isfile()}
            return _from_batches(lambda name: cast(io.BufferedReader, held[name]).read(), str(path))
    except (tarfile.TarError, EOFError, KeyError) as error:
        raise DataError(f"{path} is not the archive it should be ({error!r}): download it again.") from error


def _from_batches(read: Callable[[str], bytes], origin: str) -> Images:
    parts: list[torch.Tensor] = []
    for names in (_TRAIN, _TEST):
        try:
            batches = [_Harmless(io.BytesIO(read(name)), encoding="bytes").load() for name in names]
            pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches]).reshape(-1, 3, 32, 32)
            labels = np.concatenate([np.asarray(batch[b"labels"], np.int64) for batch in batches])
        except Exception as error:  # whatever pickle and numpy make of a damaged file
            raise DataError(f"{origin} is not CIFAR-10's Python version ({error}): download {_ARCHIVE} again.") from error
        parts += [torch.from_numpy(pixels), torch.from_numpy(labels)]
    return Images(parts[0], parts[1], parts[2], parts[3], origin)


class _Harmless(pickle.Unpickler):
    """Arrays and plain values only: a pickle from a stranger may otherwise run anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _from_npz(path: Path) -> Images | None:
    try:
        with np.load(path) as file:
            if not {"x_train", "y_train", "x_test", "y_test"} <= set(file.files):
                return None
            arrays = [torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")]
    except Exception as error:  # whatever numpy makes of a damaged file
        raise DataError(f"{path} cannot be read ({error!r}): give an npz file, or --data synthetic.") from error
    for images, labels in (arrays[:2], arrays[2:]):
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != (32, 32, 3) or labels.is_floating_point():
            raise DataError(
                f"{path} holds {images.dtype} {tuple(images.shape)} with {labels.dtype} labels: give uint8 [N, 32, 32, 3] and integers."
            )
    x, y, x_test, y_test = arrays
    return Images(
        x.permute(0, 3, 1, 2).contiguous(), y.long().flatten(), x_test.permute(0, 3, 1, 2).contiguous(), y_test.long().flatten(), str(path)
    )


def synthetic(train: int = 1000, test: int = 200) -> Images:
    """Ten classes to tell apart: stripes of a direction and a width, a hue of their own, at a random phase, in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(train + test) % 10
    axis = torch.arange(32.0)
    angle = (labels % 5) * (torch.pi / 5)
    across = angle.cos().view(-1, 1, 1) * axis.view(1, -1, 1) + angle.sin().view(-1, 1, 1) * axis.view(1, 1, -1)
    phase = torch.rand(len(labels), 1, 1, generator=generator) * 6.28
    stripes = torch.sin(across * (0.5 + 0.5 * (labels // 5)).view(-1, 1, 1) + phase).unsqueeze(1)
    hue = 0.5 + 0.5 * torch.cos(labels.view(-1, 1) * 0.6 + torch.tensor([0.0, 2.1, 4.2])).view(-1, 3, 1, 1)
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    pixels = (128 + 60 * stripes * hue + 40 * (hue - 0.5) + 30 * noise).clamp(0, 255).byte()
    return Images(pixels[:train], labels[:train], pixels[train:], labels[train:], f"synthetic: {train} + {test} pictures of stripes")


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Crops and flips that depend on the epoch and the picture alone: the same with any number of workers, and after a resume."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images, self._labels = images, labels
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Draw where each picture is cut out (0 to 8 in a padded one) and whether it is turned over."""
        drawn = torch.randint(0, 2 * (2 * _PAD + 1) ** 2, (len(self._images),), generator=torch.Generator().manual_seed(1000 + epoch))
        self._flipped, cell = drawn % 2, drawn // 2
        self._rows, self._columns = cell // (2 * _PAD + 1), cell % (2 * _PAD + 1)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, column = int(self._rows[number]), int(self._columns[number])
        cut = F.pad(normalised(self._images[number]), (_PAD,) * 4)[:, row : row + 32, column : column + 32]
        return cut.flip(2) if self._flipped[number] else cut.contiguous(), self._labels[number]


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Bytes to numbers around 0."""
    return (images - _MEAN) / _DEVIATION


def train_loader(images: Images, batch: int, workers: int = 0, drop_last: bool = False) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled; `begin_epoch` decides the order and the augmentation."""
    dataset, generator = Augmented(images.train, images.train_labels), torch.Generator()
    sampler = RandomSampler(dataset, generator=generator)
    return DataLoader(
        dataset, batch, sampler=sampler, num_workers=workers, pin_memory=workers > 0 and torch.cuda.is_available(), drop_last=drop_last
    )


def begin_epoch(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], epoch: int) -> None:
    """The same pictures in the same order whenever this epoch is run, whatever the batch size and the number of workers."""
    cast(Augmented, loader.dataset).begin_epoch(epoch)
    cast(torch.Generator, cast(RandomSampler, loader.sampler).generator).manual_seed(epoch)
