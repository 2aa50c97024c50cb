"""What every saved record can do: become JSON with its schema in it, and be read back from it; damage is named where it is."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from memfit.errors import RecordError


class Record:
    """A frozen dataclass that is saved as JSON."""

    schema: ClassVar[str]
    version: ClassVar[int] = 1
    oldest: ClassVar[int] = 1  # version that still holds all that is needed
    made_by: ClassVar[str] = ""  # the command that writes one to a file

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values, `schema` first."""
        return {"schema": f"{self.schema}/{self.version}"} | {name: _plain(getattr(self, name)) for name in self.saved_keys()}

    @classmethod
    def saved_keys(cls) -> list[str]:
        """What `to_dict` has beside the schema."""
        return [f.name for f in dataclasses.fields(cls) if f.metadata.get("saved", True)]  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write the record to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave; a record of another kind, a newer version or one too old is refused."""
        name, _, version = str(values.get("schema", "")).rpartition("/")
        if name != cls.schema or not version.isdecimal():
            raise RecordError(f"This is not a {cls.schema} record: its schema is {values.get('schema')!r}.")
        if int(version) > cls.version:
            raise RecordError(
                f"This {cls.schema} record has version {version}, this memfit reads up to {cls.version}: "
                "upgrade memfit, or make the record again."
            )
        if int(version) < cls.oldest:
            raise RecordError(f"This {cls.schema} record is an earlier memfit's and lacks what is needed now: make it again{cls._with()}.")
        try:
            return typing.cast(Self, _build(cls, values, "it"))
        except _Damage as damage:
            raise RecordError(f"This {cls.__name__} is damaged: {damage}; make it again{cls._with()}.") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file."""
        try:
            values = json.loads(Path(path).read_text())
        except OSError as error:
            way_out = f" Make it{cls._with()}." if cls.made_by else ""
            raise RecordError(f"{path} cannot be read: {error.strerror}.{way_out}") from error
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is not JSON ({error}): it is damaged or not a record of memfit's.") from error
        if not isinstance(values, dict):
            raise RecordError(f"{path} is not a record of memfit's: it holds no JSON object.")
        return cls.from_dict(values)

    @classmethod
    def _with(cls) -> str:
        return f" with {cls.made_by}" if cls.made_by else ""


class _Damage(Exception):
    """What a record holds and should not, in a few words."""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


_HELD_AS: dict[Any, Any] = {int: (int, float), float: (int, float), str: str, bool: bool, tuple: (list, tuple), dict: Mapping}


def _typed(kind: Any, value: Any, name: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(next(part for part in inner if part is not type(None)), value, name)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value, name)
    wanted = _HELD_AS.get(origin or kind, object)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind in (int, float)):
        raise _Damage(f"{name} is {reprlib.repr(value)}")
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(_typed(inner[0], item, name) for item in value)
    if origin is tuple and len(inner) != len(value):
        raise _Damage(f"{name} is {reprlib.repr(value)}")
    if origin is tuple:
        return tuple(_typed(part, item, name) for part, item in zip(inner, value, strict=True))
    if origin is dict:
        return {key: _typed(inner[1], item, name) for key, item in value.items()}
    return value


def _build(kind: type, values: Any, name: str) -> Any:
    if not isinstance(values, Mapping):
        raise _Damage(f"{name} is {reprlib.repr(values)}")
    hints = typing.get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.metadata.get("saved", True)]
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise _Damage(f"{name} lacks {', '.join(missing)}")
    return kind(**{f.name: _typed(hints[f.name], values[f.name], f.name) for f in fields if f.name in values})
