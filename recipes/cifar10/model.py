"""The two classifiers: `h2q`, whose features are quaternions, and `baseline`, a plain convolutional network.

A quaternion layer multiplies each input quaternion by a weight quaternion (the Hamilton product), so one weight of four numbers does
the work of sixteen. Features lie component after component: of C channels the first quarter are the real parts, then i, j and k.
The documents do not show the network. This one has the documented number of parameters within 0.1 %, and no BatchNorm, which they do not
mention: with it no loop over micro-batches, theirs included, could give the training of the whole batch.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

# For each component of the result (r, i, j, k) and each of the first factor: the component of the second it meets, and the sign.
_PRODUCT = (
    ((0, 1), (1, -1), (2, -1), (3, -1)),
    ((1, 1), (0, 1), (3, 1), (2, -1)),
    ((2, 1), (3, -1), (0, 1), (1, 1)),
    ((3, 1), (2, 1), (1, -1), (0, 1)),
)


def _signs(first: bool) -> torch.Tensor:
    """[16, 4] of 0, 1 and -1. Times the weight's components: the real matrix; times the input's: what the weight's components meet."""
    signs = torch.zeros(4, 4, 4)
    for result, row in enumerate(_PRODUCT):
        for weight, (entry, sign) in enumerate(row):
            if first:
                signs[result, entry, weight] = sign
            else:
                signs[result, weight, entry] = sign
    return signs.view(16, 4)


def _quaternions(*shape: int, fan_in: int) -> nn.Parameter:
    """Four real numbers each; `fan_in` of them, each with four terms, make up one component of a result."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(4 * fan_in))


def _last(inputs: int, classes: int) -> nn.Linear:
    """No class is favoured before anything was seen; without this, the first updates overshoot."""
    layer = nn.Linear(inputs, classes)
    nn.init.zeros_(layer.weight)
    return layer


class QuaternionConv2d(nn.Module):
    """A convolution with few weights and large features: its real weight, four times its parameters, is written out."""

    signs: torch.Tensor

    def __init__(self, inputs: int, outputs: int, stride: int = 1, size: int = 3) -> None:
        super().__init__()
        self.stride, self.padding = stride, size // 2
        self.register_buffer("signs", _signs(first=True), persistent=False)
        self.weight = _quaternions(4, outputs // 4, inputs // 4, size, size, fan_in=inputs // 4 * size * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        return F.conv2d(x, self.real_weight(), stride=self.stride, padding=self.padding)

    def real_weight(self) -> torch.Tensor:
        """[outputs, inputs, size, size]: every component of the result by every component of the input."""
        _, outputs, inputs, *size = self.weight.shape
        matrix = (self.signs @ self.weight.flatten(1)).view(4, 4, outputs, inputs, *size)
        return matrix.transpose(1, 2).reshape(4 * outputs, 4 * inputs, *size)


class QuaternionLinear(nn.Module):
    """A dense layer with many weights and small features: its input, not its weight, is written out four times."""

    signs: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("signs", _signs(first=False), persistent=False)
        self.weight = _quaternions(inputs, outputs // 4, fan_in=inputs // 4)  # a quarter of the rows for each component
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, inputs] to [B, outputs]."""
        met = self.signs @ x.view(len(x), 4, -1)  # [B, 16, inputs / 4]
        return (met.view(len(x), 4, -1) @ self.weight).flatten(1) + self.bias


class QuaternionResidual(nn.Module):
    """Halves the resolution, then adds two normalised convolutions to what came of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = QuaternionConv2d(inputs, outputs, stride=2)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outputs) for _ in range(2))
        self.convolutions = nn.ModuleList(QuaternionConv2d(outputs, outputs) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inputs, H, W] to [B, outputs, H / 2, W / 2]."""
        whole: torch.Tensor = self.down(x)
        change = whole
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            change = convolution(F.silu(norm(change)))
        return whole + change


class QuaternionMixing(nn.Module):
    """A residual pair of dense layers over everything that is left of an image."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = QuaternionLinear(width, hidden), QuaternionLinear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] to the same."""
        mixed: torch.Tensor = x + 0.1 * self.narrow(F.silu(self.widen(self.norm(x))))  # thousands of inputs: a whole step would be too far
        return mixed


class H2Q(nn.Module):
    """Red, green and blue are one quaternion's imaginary parts; four residual stages; `depth` mixing blocks with most of the parameters."""

    WIDTHS = (48, 48, 96, 192, 384)

    def __init__(self, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(QuaternionConv2d(4, self.WIDTHS[0]), nn.GroupNorm(8, self.WIDTHS[0]), nn.SiLU())
        self.stages = nn.Sequential(*(QuaternionResidual(a, b) for a, b in zip(self.WIDTHS, self.WIDTHS[1:], strict=False)))
        width = 4 * self.WIDTHS[-1]
        self.mixing = nn.Sequential(*(QuaternionMixing(width, 4168) for _ in range(depth)))
        self.head = nn.Sequential(nn.AvgPool1d(4), nn.Flatten(), nn.LayerNorm(self.WIDTHS[-1]), _last(self.WIDTHS[-1], classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, 32, 32] to a score for each class."""
        pure = F.pad(images, (0, 0, 0, 0, 1, 0))  # a real part of 0
        mixed = self.mixing(self.stages(self.stem(pure)).flatten(1))
        scores: torch.Tensor = self.head(mixed.view(len(mixed), -1, 4))
        return scores


class Baseline(nn.Sequential):
    """Convolution, GroupNorm and ReLU, twice at each of three resolutions, then one dense layer."""

    def __init__(self, classes: int = 10) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            for before in (inputs, outputs):
                layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _last(128, classes))


def make_model(name: str, depth: int = 4) -> nn.Module:
    """`h2q` of so many mixing blocks, or `baseline`, which has no depth to choose."""
    return H2Q(depth) if name == "h2q" else Baseline()


def parameter_count(model: nn.Module) -> int:
    """Every number that is trained."""
    return sum(p.numel() for p in model.parameters())
