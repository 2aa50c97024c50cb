"""What was measured of operators before, in a file per kind of machine: torch, the instruction set and the number of threads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

_FORMATS = {"workspaces": 7, "times": 3}  # of the entries: [bytes inside, their uncertainty, bytes kept]; [seconds, of all processors]


def machine_facts() -> dict[str, str]:
    """What measurements depend on beside torch's version."""
    return {
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "number of threads": str(torch.get_num_threads()),
        "kernels": "onednn" if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled else "native",
        "algorithms": "deterministic" if torch.are_deterministic_algorithms_enabled() else "any",
    }


def machine_kind() -> str:
    """The same as a file name."""
    instructions, threads, kernels, algorithms = machine_facts().values()
    exact = "-deterministic" if algorithms == "deterministic" else ""
    return f"torch-{torch.__version__}-{instructions.lower().replace(' ', '')}-{threads}threads-{kernels}{exact}"


def cache_directory() -> Path:
    """Where measurements are kept: MEMFIT_CACHE, or the user's cache directory."""
    chosen = os.environ.get("MEMFIT_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"


def measurements_file(what: str = "workspaces") -> Path:
    """Where this kind of machine's measurements are; without it they are made again."""
    return cache_directory() / f"{what}-{_FORMATS[what]}-{machine_kind()}.json"


class Remembered:
    """A dict of figures by signature that outlives the process. A damaged or unwritable file is no reason to stop."""

    def __init__(self, what: str = "workspaces") -> None:
        self._file = measurements_file(what)
        try:
            loaded = json.loads(self._file.read_text())
            self._known: dict[str, list[float]] = loaded if isinstance(loaded, dict) else {}
        except (OSError, ValueError):
            self._known = {}

    def get(self, key: str) -> list[float] | None:
        """What was measured for this signature, if it was."""
        return self._known.get(key)

    def put(self, found: dict[str, list[float]]) -> None:
        """Keep new measurements, now and for later processes."""
        self._known |= found
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as written:
                json.dump(self._known, written)
            os.replace(written.name, self._file)
        except OSError:
            return
