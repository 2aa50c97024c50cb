"""Files for what is to be out of memory: a temporary directory may itself be memory."""

from __future__ import annotations

import os
import tempfile
from typing import IO

import psutil


def file_on_a_disk(directory: str | None = None) -> IO[bytes]:
    """A file without a name, gone when the process is, however it ends; in the first directory for such files that is no memory.

    >>> with file_on_a_disk() as file:
    ...     file.write(b"bits")
    4
    """
    return tempfile.TemporaryFile(dir=directory or _on_a_disk(), prefix="memfit-")


def _on_a_disk() -> str:
    """A directory for temporary files that is not itself memory, as /tmp is on some machines."""
    mounted = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    for directory in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
        roots = [root for root in mounted if os.path.isdir(directory) and os.path.commonpath([root, directory]) == root]
        if os.access(directory, os.W_OK) and mounted.get(max(roots, key=len, default="")) not in ("tmpfs", "ramfs"):
            return directory
    return tempfile.gettempdir()
