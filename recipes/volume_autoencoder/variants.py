"""The guide's rungs that change what is trained, as other configurations: what `--allow altered` may use."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from recipes.volume_autoencoder.config import Config, ConfigError, Discriminator, changed


def altered(config: Config) -> dict[str, Config]:
    """Each rung by itself; those that would change nothing, or that this configuration does not allow, are left out."""
    found = {}
    for name, keys in _rungs(config).items():
        with contextlib.suppress(ConfigError):
            if (other := changed(config, **keys)) != config:
                found[name] = other
    return found


def smaller_discriminator(config: Config) -> Discriminator:
    """As the guide makes it smaller: 2 layers of 16 channels where there are more."""
    own = config.autoencoder.training.discriminator
    return Discriminator(min(own.num_layers_d, 2), min(own.num_channels, 16))


def fewer_levels(levels: tuple[bool, ...]) -> tuple[bool, ...]:
    """Attention on the last level only; on none where it already is.

    >>> fewer_levels((False, True, True)), fewer_levels((False, False, True))
    ((False, False, True), (False, False, False))
    """
    last = (*[False] * (len(levels) - 1), levels[-1])
    return last if last != levels else (False,) * len(levels)


def _rungs(config: Config) -> dict[str, dict[str, Any]]:
    """Channels as the guide lowers them: [32, 64, 64] with 16 groups becomes [16, 32, 64] with 8."""
    own, (x, y, z) = config.autoencoder, config.voxel_size
    channels = (*(max(1, c // 2) for c in own.num_channels[:-1]), own.num_channels[-1])
    groups = math.gcd(*channels, max(1, own.norm_num_groups // 2))
    return {
        "no perceptual loss": {"use_perceptual_loss": False},
        f"channels {list(channels)}": {"num_channels": channels, "norm_num_groups": groups},
        "smaller discriminator": {"discriminator": smaller_discriminator(config)},
        "fewer attention levels": {"attention_levels": fewer_levels(own.attention_levels)},
        "half the resolution in plane": {"voxel_size": (x // 2, y // 2, z)},
    }
