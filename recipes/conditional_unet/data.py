"""Class images: CIFAR-10 as npz or as downloaded, folders of pictures, and shapes drawn here."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from memfit.errors import MemfitError

SHAPES = ("disc", "square", "diamond", "ring", "frame", "plus", "cross", "bars", "columns", "checks")
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


@dataclass(frozen=True)
class Images:
    """Pictures as bytes, [N, 3, S, S], their classes, and the classes' names. `held_out` of them are for validation only."""

    x: torch.Tensor
    y: torch.Tensor
    classes: tuple[str, ...]
    held_out: int

    def batches(self, size: int, order: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        """Pictures in [-1, 1] with their classes, in the given order; the last batch may be smaller."""
        for part in order.split(size):
            yield {"x": self.x[part].float() / 127.5 - 1, "y": self.y[part]}

    @property
    def training(self) -> int:
        """How many come first and are trained on."""
        return len(self.x) - self.held_out


def synthetic(count: int, size: int) -> Images:
    """Ten kinds of shapes, each of any colour, place and extent, on a darker ground; always the same ones."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(count) % len(SHAPES)
    centre = torch.rand(count, 2, 1, 1, generator=draw) * 0.6 - 0.3
    extent = torch.rand(count, 1, 1, generator=draw) * 0.25 + 0.35
    grid = torch.linspace(-1, 1, size)
    across, down = (grid[None, None, :] - centre[:, 0]) / extent, (grid[None, :, None] - centre[:, 1]) / extent
    inside = torch.stack([_shape(number, across[n], down[n]) for n, number in enumerate(y.tolist())])[:, None]
    colour = torch.rand(count, 3, 1, 1, generator=draw) * 0.6 + 0.4
    ground = torch.rand(count, 3, 1, 1, generator=draw) * 0.3
    x = torch.where(inside, colour, ground.expand(-1, -1, size, size))
    return Images((x * 255).byte(), y, SHAPES, held_out=max(1, count // 10))


def _shape(number: int, across: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    a, d = torch.broadcast_tensors(across.abs(), down.abs())
    box = torch.maximum(a, d)
    round_, stripes = (
        (a * a + d * d).sqrt(),
        (torch.broadcast_to(across, a.shape) * 2.5).floor(),
    )
    rows = (torch.broadcast_to(down, a.shape) * 2.5).floor()
    masks = (
        round_ < 1,
        box < 0.9,
        a + d < 1.1,
        (round_ < 1) & (round_ > 0.6),
        (box < 0.9) & (box > 0.55),
        (box < 1) & (torch.minimum(a, d) < 0.3),
        (box < 1) & ((a - d).abs() < 0.35),
        (box < 1) & (rows % 2 == 0),
        (box < 1) & (stripes % 2 == 0),
        (box < 1) & ((rows + stripes) % 2 == 0),
    )
    return masks[number]


def load(path: Path, size: int) -> Images:
    """What --data-dir names: an npz, CIFAR-10's archive or its unpacked folder, or a folder with a folder of pictures for each class."""
    try:
        return _checked(_load(path, size), path)
    except MemfitError:
        raise
    except Exception as error:  # whatever numpy, pickle, tarfile or PIL make of a damaged file
        raise MemfitError(f"{path} cannot be read ({error!r}): it is damaged, or not what its name says.") from error


def _checked(images: Images, path: Path) -> Images:
    """Enough pictures, and no label that is not a class."""
    if images.training < 1:
        raise MemfitError(f"{path} has {len(images.x)} pictures: it takes at least two, one to train on and one to judge by.")
    if len(images.y) != len(images.x):
        raise MemfitError(f"{path} has {len(images.x)} pictures and {len(images.y)} labels: every picture needs one.")
    if not 0 <= int(images.y.min()) <= int(images.y.max()) < len(images.classes):
        raise MemfitError(
            f"{path} has labels from {images.y.min()} to {images.y.max()}, and {len(images.classes)} classes, counted from 0."
        )
    return images


def _load(path: Path, size: int) -> Images:
    if not path.exists():
        raise MemfitError(f"There is no {path}: --data-dir names a folder, an .npz or CIFAR-10's .tar.gz. --data synthetic needs none.")
    if not path.is_dir():
        found = _npz(path) if path.suffix == ".npz" else _archive(path)
    elif (path / "cifar-10-batches-py").is_dir():
        found = _pickled(path / "cifar-10-batches-py")
    elif (path / _BATCHES[0]).exists():
        found = _pickled(path)
    elif (path / "cifar-10-python.tar.gz").exists():
        found = _archive(path / "cifar-10-python.tar.gz")
    elif files := sorted(path.glob("*.npz")):
        found = _npz(files[0])
    else:
        return _folders(path, size)
    x, y, classes, held_out = found
    return Images(_resized(torch.from_numpy(x), size), torch.from_numpy(y.astype(np.int64)), classes, held_out)


_Found = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[str, ...], int]


def _npz(path: Path) -> _Found:
    with np.load(path) as file:
        if missing := [key for key in ("x_train", "y_train") if key not in file]:
            raise MemfitError(f"{path} has no {' and no '.join(missing)}: it needs x_train [N, H, W, 3] uint8 and y_train [N].")
        parts = ["train", "test"] if "x_test" in file and "y_test" in file else ["train"]
        pictures, labels = [file[f"x_{part}"] for part in parts], [file[f"y_{part}"].reshape(-1) for part in parts]
        names = tuple(map(str, file["classes"])) if "classes" in file else ()
    x, y = np.concatenate(pictures), np.concatenate(labels)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3 or y.dtype.kind not in "iu":
        raise MemfitError(f"{path} holds {x.dtype} {x.shape} with {y.dtype} labels: it needs pictures [N, H, W, 3] of uint8, and integers.")
    held_out = len(pictures[1]) if len(pictures) > 1 else max(1, len(x) // 10)
    return x.transpose(0, 3, 1, 2), y, names or tuple(map(str, range(int(y.max(initial=0)) + 1))), held_out


def _archive(path: Path) -> _Found:
    if not tarfile.is_tarfile(path):
        raise MemfitError(f"{path} is neither an .npz nor CIFAR-10's .tar.gz as it is downloaded.")
    with tarfile.open(path) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        return _joined({name: _unpickled(file.read()) for name, file in files.items() if file and _is_cifar(name)}, path)


def _pickled(folder: Path) -> _Found:
    return _joined({file.name: _unpickled(file.read_bytes()) for file in folder.iterdir() if _is_cifar(file.name)}, folder)


def _is_cifar(name: str) -> bool:
    return name in (*_BATCHES, "test_batch", "batches.meta")


def _joined(files: dict[str, dict[bytes, Any]], path: Path) -> _Found:
    training = [files[name] for name in _BATCHES if name in files]
    if not training:
        raise MemfitError(f"{path} has none of CIFAR-10's data_batch_1 to data_batch_5.")
    testing = [files["test_batch"]] if "test_batch" in files else []
    x = np.concatenate([batch[b"data"] for batch in (*training, *testing)]).reshape(-1, 3, 32, 32)
    y = np.concatenate([np.asarray(batch[b"labels"]) for batch in (*training, *testing)])
    names = files["batches.meta"][b"label_names"] if "batches.meta" in files else [str(n).encode() for n in range(10)]
    return x, y, tuple(name.decode() for name in names), len(testing[0][b"labels"]) if testing else max(1, len(x) // 10)


class _OnlyArrays(pickle.Unpickler):
    """CIFAR-10 is published as pickles, and a pickle may run code: this one makes arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype"} if module.split(".")[0] == "numpy" else {"encode"} if module == "_codecs" else set()
        if name not in allowed:
            raise MemfitError(f"A data batch wants to call {module}.{name}: it is not CIFAR-10 as published, and is not opened.")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickled(raw: bytes) -> dict[bytes, Any]:
    found: dict[bytes, Any] = _OnlyArrays(io.BytesIO(raw), encoding="bytes").load()
    return found


def _resized(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[-1] == size == x.shape[-2]:
        return x.contiguous()
    return torch.nn.functional.interpolate(x.float(), (size, size), mode="area").round().byte()


def _folders(path: Path, size: int) -> Images:
    """Every picture, cut to its middle square and resized; a tenth of them, evenly spread, is held out."""
    classes = tuple(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
    files = [(file, n) for n, name in enumerate(classes) for file in sorted((path / name).iterdir()) if file.suffix.lower() in _PICTURES]
    if not files:
        raise MemfitError(f"{path} has no pictures: it needs one folder for each class, an .npz, or CIFAR-10's batches.")
    held_out = files[::10]
    kept = [entry for number, entry in enumerate(files) if number % 10] or held_out
    x = torch.stack([_picture(file, size) for file, _ in (*kept, *held_out)])
    return Images(x, torch.tensor([n for _, n in (*kept, *held_out)]), classes, len(held_out))


def _picture(file: Path, size: int) -> torch.Tensor:
    with Image.open(file) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        small = image.convert("RGB").resize((size, size), Image.Resampling.BOX, (left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)
