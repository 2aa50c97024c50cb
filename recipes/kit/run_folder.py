"""A run's folder: a CSV log, the last checkpoint, pictures; and how a run goes on where it stopped.

A log and the checkpoint beside it belong together: the checkpoint knows the log as it was, and a resumed run goes on from that one.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch.optim import Optimizer


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """What it has to remember."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Remember it."""


class RunFolder:
    """`log.csv`, `last.pt` and PNG pictures in one directory."""

    def __init__(self, path: Path, parts: dict[str, Stateful], resume: bool = False) -> None:
        self.path, self.parts, self._unclaimed = path, dict(parts), dict[str, Any]()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse(f"{path} cannot be a run's folder ({error.strerror}): name another --output-dir.")
        self._log = path / "log.csv"
        self._begins_with: str | None = None if resume else ""  # what is in the log before this run's first row; None: what is there

    def log(self, **values: object) -> None:
        """One row of `log.csv`; the first row's names are its header. Another run's log stays until this one has something to say."""
        if self._begins_with is not None:
            with self._log.open("w", newline="") as file:
                file.write(self._begins_with)
            self._begins_with = None
        with self._log.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(values))
            if not file.tell():
                writer.writeheader()
            writer.writerow(values)

    def save(self, epoch: int, name: str = "last.pt") -> Path:
        """Everything the next epoch depends on, random state included; a crash while writing leaves the old file."""
        state = {"epoch": epoch, "log": self._logged(), **_random_state(), **{part: it.state_dict() for part, it in self.parts.items()}}
        path, unfinished = self.path / name, self.path / f"{name}.unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, path)
        return path

    def _logged(self) -> str:
        if self._begins_with is not None or not self._log.exists():
            return self._begins_with or ""
        with self._log.open(newline="") as file:
            return file.read()

    def resume(self, learning_rate: float | None = None, name: str = "last.pt") -> int:
        """Load the last checkpoint; the number of epochs done. A learning rate that is given goes before the saved one."""
        path = self.path / name
        if not path.exists():
            _refuse(f"There is nothing to resume: {path} does not exist. Leave out --resume, or name the run's folder.")
        state = _read(path)
        missing = [part for part in ("epoch", "random", *self.parts) if part not in state]
        if missing:
            _refuse(f"{path} has no {', '.join(missing)}: it was saved by another kind of run.")
        for part, it in self.parts.items():
            try:
                it.load_state_dict(state[part])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                _refuse(f"{path} was saved by a run with other flags; its {part} does not fit this one: {_shortened(error)}")
        _set_random_state(state)
        self._begins_with = state.get("log")
        if learning_rate is not None:
            for group in (group for it in self.parts.values() if isinstance(it, Optimizer) for group in it.param_groups if "lr" in group):
                group["lr"] = learning_rate
        self._unclaimed = {name: it for name, it in state.items() if name not in self.parts}
        return int(state["epoch"])

    def add(self, name: str, part: Stateful) -> None:
        """A part that is made when the others are resumed. It goes on where both it and its last state have something to remember.

        So a checkpoint made without it resumes, and so does one of a run that was fitted in another way.
        """
        self.parts[name] = part
        if (state := self._unclaimed.pop(name, None)) and part.state_dict():
            part.load_state_dict(state)


def _random_state() -> dict[str, Any]:
    """Of the CPU's generator, and of each card's where there are some."""
    cards = {"random_cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {}
    return {"random": torch.get_rng_state(), **cards}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["random"])
    if (cards := state.get("random_cuda")) and len(cards) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cards)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
    except Exception:  # a damaged file may be anything to the unpickler, whose own advice is for other cases
        _refuse(f"{path} cannot be read: it is damaged, or no checkpoint. Without --resume, training begins anew.")
    return state if isinstance(state, dict) else {}


def _shortened(error: Exception) -> str:
    words = str(error).split()
    return " ".join(words[:30]) + (" …" if len(words) > 30 else "")


def _refuse(message: str) -> NoReturn:
    """A mistake of the user's: one message, exit code 2."""
    print(message, file=sys.stderr)
    raise SystemExit(2)
