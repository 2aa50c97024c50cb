"""Radar voxels [4, z, y, x]: occupancy, velocity, intensity, height. From folders of voxels, from radar points, or made here.

A folder of voxels: `.npy` or `.npz` (key `voxels`, or the only array), in `train/` and `val/`, or all in one place (the last tenth is
then for validation). Radar points: one `.npz` with `train_xyzvi` [points, 5] (x, y, z in metres, velocity, intensity), `train_frame` and
`train_rec` (the frame and the recording of each point, in order), and the same for `test_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Subset

from recipes.radar_vae.model import CHANNELS, REDUCTION

Grid = tuple[int, int, int]
Floats = npt.NDArray[np.float32]
Volumes = Dataset[torch.Tensor]
FRAMES = 60  # a window of two seconds, as RadHAR's authors cut it
_MANY = 20.0  # so many points in a voxel count as full


class DataError(Exception):
    """What is wrong with the data, and what to do."""

    def __str__(self) -> str:
        return super().__str__().rpartition("DataError: ")[2].strip()  # a loader's worker puts its traceback before the message


class PointWindows(Volumes):
    """Windows of consecutive frames of recordings, voxelised when asked for."""

    def __init__(self, points: Floats, frame: npt.NDArray[np.int32], rec: npt.NDArray[np.int16], bounds: Floats, grid: Grid) -> None:
        self.points, self.bounds, self.grid = points, bounds, grid
        window = rec.astype(np.int64) * 1_000_000 + (frame - 1) // FRAMES
        starts = np.flatnonzero(np.diff(window, prepend=-1))
        self.slices = list(zip(starts, [*starts[1:], len(points)], strict=True))

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, number: int) -> torch.Tensor:
        start, end = self.slices[number]
        return voxelise(self.points[start:end], self.bounds, self.grid)


class VoxelFiles(Volumes):
    """One volume a file."""

    def __init__(self, files: Sequence[Path], grid: Grid) -> None:
        self.files, self.grid = files, grid

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        path, wanted = self.files[number], (CHANNELS, *self.grid)
        with _reading(path):
            volume = _array_in(path).astype(np.float32)
        if volume.shape != wanted:
            other = volume.ndim == 4 and len(volume) == CHANNELS
            way_out = f"give its grid with --grid {' '.join(map(str, volume.shape[1:]))}" if other else f"a volume is [{CHANNELS}, z, y, x]"
            raise DataError(f"{path} has the shape {volume.shape}, not {wanted}: {way_out}.")
        if not np.isfinite(volume).all():
            raise DataError(f"{path} holds numbers that are not finite: a volume is made of numbers only.")
        return torch.from_numpy(volume)


class SyntheticVolumes(Volumes):
    """Rooms with a floor, a wall and a few moving bodies, as a radar would see their surfaces. Volume i is always the same."""

    def __init__(self, count: int, grid: Grid, seed: int) -> None:
        self.count, self.grid, self.seed = count, grid, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        if not 0 <= number < self.count:
            raise IndexError(number)
        chance = np.random.default_rng((self.seed, number))
        floor = np.column_stack([chance.uniform(0, 1, (400, 2)), chance.normal(0.05, 0.01, 400), np.zeros(400), np.full(400, 0.3)])
        wall = np.column_stack([chance.normal(0.9, 0.01, 300), chance.uniform(0, 1, (300, 2)), np.zeros(300), np.full(300, 0.9)])
        bodies = [_body(chance) for _ in range(chance.integers(1, 4))]
        bounds = np.array([[0, 0, 0, -1, 0], [1, 1, 1, 1, 1]], dtype=np.float32)
        return voxelise(np.concatenate([floor, wall, *bodies]).astype(np.float32), bounds, self.grid)


def _body(chance: np.random.Generator) -> npt.NDArray[np.float64]:
    """An upright ellipsoid's surface: every point has the body's velocity, seen from the front."""
    directions = chance.normal(size=(300, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    middle, radius = chance.uniform([0.2, 0.2, 0.4], [0.8, 0.8, 0.5]), np.array([0.08, 0.08, 0.35])
    velocity = -chance.uniform(-1, 1) * directions[:, 0]
    return np.column_stack([middle + radius * directions, velocity, 0.4 + 0.4 * np.abs(directions[:, 0])])


def voxelise(points: Floats, bounds: Floats, grid: Grid) -> torch.Tensor:
    """Points [n, 5] inside the bounds as a volume [4, z, y, x]: occupancy, and each voxel's mean velocity, intensity, height."""
    low, high = bounds
    points = points[((points[:, :3] >= low[:3]) & (points[:, :3] < high[:3])).all(1)]
    unit = np.clip((points - low) / (high - low), 0, 1)
    cell = np.minimum((unit[:, 2::-1] * grid).astype(np.int64), np.array(grid) - 1)
    place = np.ravel_multi_index(tuple(cell.T), grid)
    velocity = np.clip(points[:, 3] / max(abs(low[3]), abs(high[3]), 1e-6), -1, 1)
    count = np.bincount(place, minlength=int(np.prod(grid)))
    sums = [np.bincount(place, values, minlength=len(count)) for values in (velocity, unit[:, 4], unit[:, 2])]
    occupancy = np.minimum(np.log1p(count) / np.log1p(_MANY), 1)
    channels = [occupancy, *(total / np.maximum(count, 1) for total in sums)]
    return torch.from_numpy(np.stack(channels).reshape(CHANNELS, *grid).astype(np.float32))


def open_data(data: str | None, directory: str | None, grid: Grid, max_samples: int | None) -> tuple[Volumes, Volumes]:
    """Volumes for training and for validation."""
    if any(size % reduction for size, reduction in zip(grid, REDUCTION, strict=True)):
        raise DataError(f"A grid of {grid} does not divide by {REDUCTION}, which is how much the latent is smaller: choose another --grid.")
    if directory is None:
        if data != "synthetic":
            raise DataError("There is no data: name a folder or a file with --dataset_dir, or try --data synthetic.")
        count = max_samples or 64
        return SyntheticVolumes(count, grid, seed=0), SyntheticVolumes(max(1, count // 4), grid, seed=1)
    train, val = _open(Path(directory), grid)
    return _spread(train, max_samples), _spread(val, max_samples and max(1, max_samples // 4))


def _open(path: Path, grid: Grid) -> tuple[Volumes, Volumes]:
    if not path.exists():
        raise DataError(f"There is no {path}: --dataset_dir names a folder of voxels or an .npz of radar points.")
    points = [file for file in ([path] if path.is_file() else sorted(path.glob("*.npz"))) if _holds_points(file)]
    if points:
        return _open_points(points[0], grid)
    folders = [path / "train", path / "val"] if (path / "train").is_dir() else [path]
    files = [sorted(file for file in folder.glob("*") if file.suffix in (".npy", ".npz")) for folder in folders]
    if not files[0] or not files[-1] or path.is_file():
        raise DataError(f"{path} holds neither .npy or .npz voxels (in train and val, or all in one place) nor an .npz with train_xyzvi.")
    if len(files) == 1:
        last = max(1, len(files[0]) // 10)
        files = [files[0][:-last] or files[0], files[0][-last:]]
    return VoxelFiles(files[0], grid), VoxelFiles(files[1], grid)


def _holds_points(file: Path) -> bool:
    if file.suffix != ".npz":
        return False
    with _reading(file), np.load(file) as arrays:
        return "train_xyzvi" in arrays


def _open_points(file: Path, grid: Grid) -> tuple[Volumes, Volumes]:
    """Outliers, half a percent at each end of each axis, are outside the grid; velocity and intensity are clipped."""
    with _reading(file), np.load(file) as arrays:
        parts = [_points_of(arrays, part, file) for part in ("train", "test")]
    bounds = np.percentile(parts[0][0], [0.5, 99.5], axis=0).astype(np.float32)
    train, test = (PointWindows(points, frame, rec, bounds, grid) for points, frame, rec in parts)
    return train, test


def _points_of(arrays: Mapping[str, Any], part: str, file: Path) -> tuple[Floats, Any, Any]:
    """The points of a part, the frame of each and the recording of each."""
    names = [f"{part}_{what}" for what in ("xyzvi", "frame", "rec")]
    if missing := [name for name in names if name not in arrays]:
        raise DataError(f"{file} has no {', '.join(missing)}: radar points need {', '.join(names)}.")
    points, frame, rec = (arrays[name] for name in names)
    if points.shape != (len(points), 5) or not len(points) == len(frame) == len(rec) or not len(points) or not np.isfinite(points).all():
        shapes = ", ".join(f"{name} {arrays[name].shape}" for name in names)
        raise DataError(f"{file} has {shapes}: {names[0]} needs five finite numbers for each point, the others one.")
    return points.astype(np.float32), frame, rec


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file is told with its name."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a damaged file may fail as a zip, as a header, as a pickle
        raise DataError(f"{path} cannot be read: it is damaged, or holds something else than numbers ({type(error).__name__}).") from error


def _array_in(path: Path) -> Floats:
    if path.suffix == ".npy":
        return np.load(path)  # type: ignore[no-any-return]
    with np.load(path) as arrays:
        names = list(arrays)
        if "voxels" not in names and len(names) != 1:
            raise DataError(f"{path} holds {', '.join(names)}: name the volume voxels, or keep it alone.")
        return arrays["voxels" if "voxels" in names else names[0]]  # type: ignore[no-any-return]


def length_of(volumes: Volumes) -> int:
    """How many there are."""
    return len(volumes)  # type: ignore[arg-type]


def _spread(volumes: Volumes, count: int | None) -> Volumes:
    """So many of them, evenly spread, so that every recording has its share."""
    if count is None or count >= length_of(volumes):
        return volumes
    return Subset(volumes, [int(number) for number in np.linspace(0, length_of(volumes) - 1, count)])
