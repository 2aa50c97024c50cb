"""LPIPS with SqueezeNet's features on slices of a volume, as MONAI's PerceptualLoss(is_fake_3d=True) does it, without torchvision."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

_TAPS = (1, 4, 7, 9, 10, 11, 12)  # LPIPS looks at SqueezeNet after these layers
_MEAN, _SPREAD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # LPIPS's, for pictures between -1 and 1


class WeightsError(Exception):
    """A file that does not hold SqueezeNet's weights."""


class Fire(nn.Module):
    """SqueezeNet's block: few channels, then two kinds of many."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice `expanded` channels."""
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], 1)


def squeezenet_features() -> nn.Sequential:
    """The layers of torchvision's squeezenet1_1, under its names."""
    pool = [nn.MaxPool2d(3, 2, ceil_mode=True) for _ in range(3)]
    first = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool[0], Fire(64, 16, 64), Fire(128, 16, 64), pool[1]]
    middle = [Fire(128, 32, 128), Fire(256, 32, 128), pool[2], Fire(256, 48, 192), Fire(384, 48, 192)]
    return nn.Sequential(*first, *middle, Fire(384, 64, 256), Fire(512, 64, 256))


class SlicePerceptualLoss(nn.Module):
    """How far apart the features of two volumes' slices are, along all three axes; a random part of the slices each time.

    Without a file of weights the features are random and always the same: they still compare texture at several scales, but they were
    never trained on pictures.
    """

    mean: torch.Tensor
    spread: torch.Tensor

    def __init__(self, weights: Path | None = None, share_of_slices: float = 0.5) -> None:
        super().__init__()
        self.share_of_slices = share_of_slices
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            self.features = squeezenet_features()
        if weights is not None:
            self._load(weights)
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(_SPREAD).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True)
            self.features.load_state_dict({k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")})
        except Exception as error:  # a damaged file may be anything to the unpickler
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise WeightsError(f"{path} is not torchvision's squeezenet1_1: {why}") from None

    def forward(self, volume: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A scalar: the mean over the slices of each axis, summed over the axes."""
        return torch.stack([self._of_axis(volume, target, axis) for axis in (2, 3, 4)]).sum()

    def _of_axis(self, volume: torch.Tensor, target: torch.Tensor, axis: int) -> torch.Tensor:
        count = volume.shape[0] * volume.shape[axis]
        chosen = torch.randperm(count, device=volume.device)[: max(1, int(count * self.share_of_slices))]
        return self._distance(_slices(volume, axis)[chosen], _slices(target, axis)[chosen])

    def _distance(self, pictures: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, y = ((p - self.mean) / self.spread for p in (pictures, targets))  # one grey channel becomes three
        total = x.new_zeros(())
        for number, layer in enumerate(self.features):
            x, y = layer(x), layer(y)
            if number in _TAPS:
                total = total + (_unit(x) - _unit(y)).pow(2).mean((2, 3)).sum(1).mean()
        return total


def _slices(volume: torch.Tensor, axis: int) -> torch.Tensor:
    """[B, 1, X, Y, Z] as [B * slices, 1, rows, columns]."""
    return volume.movedim(axis, 1).flatten(0, 1)


def _unit(features: torch.Tensor) -> torch.Tensor:
    """The epsilon stands inside the root: where all features are zero, the gradient stays finite."""
    return features / (features.pow(2).sum(1, keepdim=True) + 1e-10).sqrt()
