"""Where a step keeps what a proof compares. Found on the plain step, so that a lever that moves things about is still seen."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from memfit.proof.shelf import Key, Shelf
from memfit.step import Phase, Step
from memfit.step.batches import tensors_in


@dataclass(frozen=True)
class Places:
    """A step's parameters and buffers by name; buffers by their module, since a module may exchange them."""

    parameters: dict[torch.Tensor, str]
    buffers: dict[str, tuple[nn.Module, str]]

    @classmethod
    def of(cls, step: Step) -> Places:
        """Look once, before any lever is on."""
        parameters: dict[torch.Tensor, str] = {}
        buffers: dict[str, tuple[nn.Module, str]] = {}
        for prefix, model in step.models.items():
            for path, module in model.named_modules(prefix=prefix):
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        parameters.setdefault(parameter, _joined(path, name))
                for name in module._buffers:
                    buffers.setdefault(_joined(path, name), (module, name))
        return cls(parameters, buffers)

    def gradients(self, step: Step, phase: Phase, kind: str = "gradients") -> Iterator[tuple[Key, torch.Tensor]]:
        """The parameters that a phase's optimizers train, under the keys of their gradients; those of another model have none."""
        of_phase = f" in {phase.name}" if len(step.all_phases) > 1 else ""
        for optimizer in phase.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter in self.parameters:
                    yield Key(kind, f"{self.parameters[parameter]}{of_phase}"), parameter

    def shelve_state(self, step: Step, shelf: Shelf) -> None:
        """Everything a training step leaves behind."""
        self.shelve_parameters(shelf)
        self.shelve_states(step, shelf)
        self.shelve_averages(shelf)

    def shelve_averages(self, shelf: Shelf, when: str = "") -> None:
        """Buffers and random generators as they are now, which no optimizer moves."""
        for name, (module, local) in self.buffers.items():
            if (buffer := module._buffers.get(local)) is not None:
                shelf.put(Key(f"{when}buffers", name), buffer)
        for source, state in _random_states():
            shelf.put(Key(f"{when}rng", source), state)

    def shelve_parameters(self, shelf: Shelf, kind: str = "parameters") -> None:
        """The parameters as they are now."""
        for parameter, name in self.parameters.items():
            shelf.put(Key(kind, name), parameter)

    def shelve_states(self, step: Step, shelf: Shelf) -> None:
        """What the optimizers keep for each parameter."""
        for number, optimizer in enumerate(step.optimizers):
            for parameter, state in optimizer.state.items():
                owner = f"{type(optimizer).__name__} {number}" if len(step.optimizers) > 1 else type(optimizer).__name__
                for path, value in tensors_in({k: _as_tensor(v) for k, v in state.items()}, owner):
                    shelf.put(Key("optimizer_state", f"{path} of {self.parameters.get(parameter, 'a new parameter')}"), value)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _as_tensor(value: object) -> object:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, (int, float)) else value


def _random_states() -> Iterator[tuple[str, torch.Tensor]]:
    yield "torch", torch.get_rng_state()
    if torch.cuda.is_initialized():
        yield from ((f"torch on cuda:{number}", state) for number, state in enumerate(torch.cuda.get_rng_state_all()))
    for source, state in (("Python", random.getstate()), ("numpy", np.random.get_state())):
        yield source, torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
