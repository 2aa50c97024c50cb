"""What Linux's control groups leave to this process: a container's limit, a batch system's, one of systemd-run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups is mounted, and what its files are called."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    file_pages: tuple[str, ...]  # in memory.stat: the kernel takes these back before anybody has to go


_FIRST = _Version(("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_SECOND = _Version(("", "unified"), "memory.max", "memory.current", ("inactive_file", "active_file"))


def room_in_cgroups(held: int, root: Path = Path("/")) -> float:
    """What a process that holds so much may grow to beside the others in its groups and in all their parents; infinite without a limit."""
    return min((_room(folder, version, held) for folder, version in _groups(root)), default=inf)


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Those that count the process's memory, the innermost first. Inside a container the outer ones cannot be seen, and are left out."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _FIRST if controllers else _SECOND
        for mount in version.mounts:
            top = root / "sys/fs/cgroup" / mount
            innermost = top / path.lstrip("/")
            yield from ((folder, version) for folder in (innermost, *innermost.parents) if folder.is_relative_to(top))


def _room(folder: Path, version: _Version, held: int) -> float:
    limit, used = _text(folder / version.limit).strip(), _text(folder / version.usage).strip()
    if not limit.isdigit():  # "max", or not there
        return inf
    others = int(used or 0) - _file_pages(folder, version) - held
    return max(0, int(limit) - max(0, others))


def _file_pages(folder: Path, version: _Version) -> int:
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return sum(int(row[1]) for row in rows if row[0] in version.file_pages)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
