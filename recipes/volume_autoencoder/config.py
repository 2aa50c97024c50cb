"""The YAML file: the documented keys, their defaults, and one clear message for each thing that can be wrong with them."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class ConfigError(Exception):
    """What is wrong in the file, and what to write instead."""


@dataclass(frozen=True)
class Discriminator:
    """`autoencoder.training.discriminator`."""

    num_layers_d: int = 3
    num_channels: int = 32


@dataclass(frozen=True)
class Training:
    """`autoencoder.training`."""

    batch_size: int = 4
    use_perceptual_loss: bool = True
    use_gradient_checkpointing: bool = False
    gradient_accumulation_steps: int = 1
    discriminator: Discriminator = field(default_factory=Discriminator)


@dataclass(frozen=True)
class Autoencoder:
    """`autoencoder`."""

    num_channels: tuple[int, ...] = (32, 64, 64)
    norm_num_groups: int = 16
    attention_levels: tuple[bool, ...] = (False, False, True)
    training: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Device:
    """`device`."""

    mixed_precision: bool = False


@dataclass(frozen=True)
class Data:
    """`data`."""

    cache_rate: float = 1.0
    num_workers: int = 0


@dataclass(frozen=True)
class Config:
    """The whole file; what it leaves out has the defaults of the documented 64³ configuration."""

    voxel_size: tuple[int, ...] = (64, 64, 64)
    autoencoder: Autoencoder = field(default_factory=Autoencoder)
    device: Device = field(default_factory=Device)
    data: Data = field(default_factory=Data)

    @property
    def samples_a_step(self) -> int:
        """Volumes that count for one update of the weights."""
        return self.autoencoder.training.batch_size * self.autoencoder.training.gradient_accumulation_steps


def load_config(path: Path) -> Config:
    """Read and check a file; ConfigError names the key and the fix."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a YAML file, as in --config configs/default.yaml.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return checked(_section(Config, {} if content is None else content, ""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values for some keys, each named by its last word; the autoencoder's `num_channels` is meant."""
    paths = dict(_paths(Config, ""))
    for key, value in values.items():
        config = _replaced(config, paths[key].split("."), value)
    return checked(config)


def _replaced(section: Any, way: list[str], value: Any) -> Any:
    inner = value if len(way) == 1 else _replaced(getattr(section, way[0]), way[1:], value)
    return dataclasses.replace(section, **{way[0]: inner})


def _section(kind: Any, content: Any, where: str) -> Any:
    """A dataclass from a mapping, key by key."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where.rstrip('.') or 'the file'} must be a section with keys, not {content!r}.")
    types_of = typing.get_type_hints(kind)
    for key in content:
        if key not in types_of:
            raise ConfigError(_unknown(where, str(key), list(types_of)))
    return kind(**{key: _value(types_of[key], value, f"{where}{key}") for key, value in content.items()})


def _value(kind: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, f"{key}.")
    if isinstance(kind, types.GenericAlias):
        item = typing.get_args(kind)[0]
        if not isinstance(value, list) or not value or not all(_is(item, one) for one in value):
            raise ConfigError(f"{key} is {value!r}: write a list of {_WORDS[item]}, as in {key.rpartition('.')[2]}: {_EXAMPLES[item]}.")
        return tuple(value)
    if not _is(kind, value):
        raise ConfigError(f"{key} is {value!r}: write one of {_WORDS[kind]}." if kind is bool else f"{key} is {value!r}: write a number.")
    return kind(value)


_WORDS: dict[Any, str] = {int: "whole numbers", bool: "true or false", float: "numbers"}
_EXAMPLES: dict[Any, str] = {int: "[32, 64, 64]", bool: "[false, false, true]"}


def _is(kind: Any, value: Any) -> bool:
    return isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)


def _unknown(where: str, key: str, known: list[str]) -> str:
    """A key in the wrong section is the commonest mistake: say where it belongs."""
    everywhere = dict(_paths(Config, ""))
    near = difflib.get_close_matches(key, everywhere, 1, 0.75)
    guess = f" Did you mean {everywhere[near[0]]}?" if near else ""
    return f"there is no key {where}{key}.{guess} {where.rstrip('.') or 'The file'} has {', '.join(known)}."


def _paths(kind: Any, where: str) -> typing.Iterator[tuple[str, str]]:
    for key, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from _paths(inner, f"{where}{key}.")
        if (key, where) != ("num_channels", "autoencoder.training.discriminator."):  # the autoencoder's own is meant more often
            yield key, f"{where}{key}"


def checked(config: Config) -> Config:
    """The configuration, if its values go together."""
    own, training = config.autoencoder, config.autoencoder.training
    channels, groups = own.num_channels, own.norm_num_groups
    positive = {"autoencoder.norm_num_groups": groups, "autoencoder.training.batch_size": training.batch_size}
    positive |= {"autoencoder.training.gradient_accumulation_steps": training.gradient_accumulation_steps}
    positive |= {f"autoencoder.training.discriminator.{k}": v for k, v in dataclasses.asdict(training.discriminator).items()}
    for key, value in positive.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}: write 1 or more.")
    if min(channels) < 1:
        raise ConfigError(f"autoencoder.num_channels is {list(channels)}: each level needs 1 or more.")
    if wrong := [c for c in channels if c % groups]:
        fits = [g for g in range(1, min(channels) + 1) if all(c % g == 0 for c in channels)]
        raise ConfigError(
            f"autoencoder.norm_num_groups is {groups}, which does not divide {wrong[0]} of num_channels {list(channels)}: "
            f"write norm_num_groups: {max(g for g in fits if g <= groups)} (possible are {', '.join(map(str, fits))})."
        )
    if len(own.attention_levels) != len(channels):
        given, wanted = len(own.attention_levels), len(channels)
        example = (*own.attention_levels, *[False] * wanted)[:wanted]
        raise ConfigError(
            f"autoencoder.attention_levels has {given} values and num_channels {wanted}: write one for each level, "
            f"as in attention_levels: [{', '.join(str(level).lower() for level in example)}]."
        )
    if not 0 <= config.data.cache_rate <= 1 or config.data.num_workers < 0:
        raise ConfigError("data.cache_rate is a share between 0 and 1, and data.num_workers 0 or more.")
    return _sizes_checked(config)


def _sizes_checked(config: Config) -> Config:
    """Each level halves a volume, the discriminator and the perceptual network shrink it further: something must be left."""
    training, factor = config.autoencoder.training, 2 ** (len(config.autoencoder.num_channels) - 1)
    if len(config.voxel_size) != 3:
        raise ConfigError(f"voxel_size is {list(config.voxel_size)}: write three numbers, as in voxel_size: [64, 64, 64].")
    least = 3 * 2**training.discriminator.num_layers_d
    needs = f"discriminator of {training.discriminator.num_layers_d} layers"
    if training.use_perceptual_loss and least < 17:
        least, needs = 17, "perceptual loss"
    for size in config.voxel_size:
        if size % factor or size < least:
            good = max(size, least) + -max(size, least) % factor
            why = f"the {needs} needs {least} or more" if size < least else f"{factor // 2} of its levels halve it"
            raise ConfigError(f"voxel_size is {list(config.voxel_size)}: {size} does not work, {why}. Write {good} there.")
    return config
