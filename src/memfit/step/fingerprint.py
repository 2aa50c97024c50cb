"""Readable facts that tell one training step from another: a plan carries them and is refused by a step that has others.

Where a step is built is none of them: a plan may be made on one machine for the device of another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.step import Phase, Step
from memfit.step.batches import tensors_in

_OF_A_DEVICE = re.compile(r" on \w+$")  # earlier plans told it of every tensor


def fingerprint(step: Step) -> dict[str, str]:
    """What a plan has to know again.

    >>> net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> step = Step(net, lambda m, b: m(b).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))
    >>> [f"{fact}: {value}" for fact, value in fingerprint(step).items()][1:3]
    ['model: Sequential, training', 'model.0: 2 tensors, 10 values, 10 trained, digest 4ff670d2']
    """
    facts = {"torch": _without_device("torch", torch.__version__)}
    for name, model in step.models.items():
        facts.update(_model_facts(f"model {name}" if name else "model", model))
    facts.update({path: _tensor_fact(t) for path, t in tensors_in(step.batch)})
    for phase in step.all_phases:
        facts[f"phase {phase.name}" if phase.name else "training"] = _phase_fact(phase)
    return facts


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed since a plan was made, one plain line each.

    >>> differences({"torch": "2.9", "batch": "float32 [4]"}, {"torch": "2.9", "batch": "float32 [8]"})
    ['batch: float32 [4] when planned, float32 [8] now']
    """
    return [
        f"{fact}: {then.get(fact, 'not there')} when planned, {now.get(fact, 'not there')} now"
        for fact in dict.fromkeys((*then, *now))
        if _without_device(fact, then.get(fact, "")) != _without_device(fact, now.get(fact, ""))
    ]


def _without_device(fact: str, value: str) -> str:
    """torch's version ends in what it was built for."""
    return value.partition("+")[0] if fact == "torch" else _OF_A_DEVICE.sub("", value)


def _model_facts(word: str, model: nn.Module) -> Iterator[tuple[str, str]]:
    """A line for the model and one for each of its parts, so that a difference says where to look."""
    yield word, f"{type(model).__name__}, {'training' if model.training else 'evaluating'}"
    parts: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts.setdefault(name.partition(".")[0], []).append((name, tensor))
    for part, tensors in parts.items():
        yield f"{word}.{part}", _part_fact(tensors)


def _part_fact(tensors: list[tuple[str, torch.Tensor]]) -> str:
    values = sum(t.numel() for _, t in tensors)
    trained = sum(t.numel() for _, t in tensors if t.requires_grad)
    lines = sorted(f"{name} {_tensor_fact(t)} on cpu {t.requires_grad}" for name, t in tensors)  # as earlier plans had it, wherever it is
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}, {values:,} values, {trained:,} trained, digest {digest}"


def _tensor_fact(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _phase_fact(phase: Phase) -> str:
    clip = "" if phase.clip_grad_norm is None else f", gradients clipped at {phase.clip_grad_norm:g}"
    return " and ".join(map(_optimizer_fact, phase.optimizers)) + clip


def _optimizer_fact(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__} of {sum(len(group['params']) for group in optimizer.param_groups)} parameters"
