"""Readable facts that tell one training step from another: a plan carries them and is refused by a step that has others.

Where a step is built is none of them: a plan may be made on one machine for the device of another. Nor is what training changes: values,
states, learning rates.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.step import Phase, Step
from memfit.step.batches import tensor_fact, tensor_facts
from memfit.step.codes import code_fact, function_of

_CODE = re.compile(r", code \w+ of Python (\S+)")
_CHOICES = ("foreach", "fused")  # None: torch chooses
_SWITCHES = ("amsgrad", "capturable", "centered", "differentiable", "maximize", "momentum", "nesterov", "weight_decay")  # on unless 0
_MOST_KINDS = 5


def fingerprint(step: Step) -> dict[str, str]:
    """What a plan has to know again.

    >>> net = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> step = Step(net, lambda m, b: m(b).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))
    >>> for line in [f"{fact}: {value}" for fact, value in fingerprint(step).items()][1:5]: print(line)
    model: Sequential, training
    model.0: 2 tensors, 10 values, 10 trained, digest 8a06e4c1
    model.0's modules: Linear(in_features=4, out_features=2, bias=True)
    model.1's modules: ReLU()
    """
    facts = {"torch": torch.__version__.partition("+")[0]}  # it ends in what it was built for
    for name, model in step.models.items():
        facts.update(_model_facts(f"model {name}" if name else "model", model))
    facts.update(_code_facts(step.models.values()))
    facts.update(tensor_facts(step.batch))
    for phase in step.all_phases:
        facts[f"phase {phase.name}" if phase.name else "training"] = _phase_fact(phase)
        facts[f"loss {phase.name}" if phase.name else "loss"] = code_fact(phase.loss if step.loss is None else step.loss)
    return facts | ({} if step.weight is None else {"weight": code_fact(step.weight)})


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed since a plan was made, one plain line each.

    >>> differences({"torch": "2.9", "batch": "float32 [4]"}, {"torch": "2.9", "batch": "float32 [8]"})
    ['batch: float32 [4] when planned, float32 [8] now']
    """
    return [
        f"{fact}: {then.get(fact, 'not there')} when planned, {now.get(fact, 'not there')} now"
        for fact in dict.fromkeys((*then, *now))
        if not _same(then.get(fact), now.get(fact))
    ]


def _same(then: str | None, now: str | None) -> bool:
    """Code that two versions of Python compiled cannot be compared: the names can."""
    if then is None or now is None:
        return then is now
    return then == now or (_CODE.findall(then) != _CODE.findall(now) and _CODE.sub("", then) == _CODE.sub("", now))


def _model_facts(word: str, model: nn.Module) -> Iterator[tuple[str, str]]:
    """A line for the model and two for each of its parts, so that a difference says where to look."""
    yield word, f"{_kind(model)}, {_mode(model)}"
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensors[name.partition(".")[0]].append((name, tensor))
    modules: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        modules[name.partition(".")[0]].append((name, module))
    modules.pop("")  # the model itself
    for part in dict.fromkeys((*tensors, *modules)):
        if part in tensors:
            yield f"{word}.{part}", _tensors_fact(tensors[part])
        if part in modules:
            yield f"{word}.{part}'s modules", _modules_fact(modules[part], model.training)


def _tensors_fact(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    values = sum(t.numel() for _, t in tensors)
    trained = sum(t.numel() for _, t in tensors if t.requires_grad)
    digest = _digest(f"{name} {tensor_fact(t)} {t.requires_grad}" for name, t in tensors)
    return f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}, {values:,} values, {trained:,} trained, digest {digest}"


def _modules_fact(modules: Sequence[tuple[str, nn.Module]], training: bool) -> str:
    """What they are, how they are set, and which of them are in another mode than the model."""
    others = [module for _, module in modules if module.training != training]
    mode = f", {_mode(others[0])}" if others else ""
    if len(modules) == 1:
        return _kind(modules[0][1]) + mode
    count = Counter(type(module).__name__ for _, module in modules).most_common()
    kinds = [f"{number} {kind}" for kind, number in count[:_MOST_KINDS]]
    kinds += [f"{len(count) - _MOST_KINDS} other kinds"] if len(count) > _MOST_KINDS else []
    digest = _digest(f"{name} {_kind(module)} {module.training != training}" for name, module in modules)
    return ", ".join(kinds) + (f"{mode} {len(others)} of {len(modules)}" if others else "") + f", digest {digest}"


def _kind(module: nn.Module) -> str:
    """Its type, and how it is set where torch says it: what modules of users' say of themselves may change as they train."""
    lists = isinstance(module, (nn.ParameterList, nn.ParameterDict))  # these say where their tensors are
    settings = f"({module.extra_repr()})" if _is_torchs(type(module)) and not lists else ""
    return type(module).__name__ + ("" if settings == "()" and next(module.children(), None) else settings)


def _mode(module: nn.Module) -> str:
    return "training" if module.training else "evaluating"


def _code_facts(models: Iterable[nn.Module]) -> Iterator[tuple[str, str]]:
    """What modules of users' own do, a line for each class."""
    seen: dict[str, list[str]] = defaultdict(list)
    for kind in dict.fromkeys(type(module) for model in models for module in model.modules()):
        function = None if _is_torchs(kind) else function_of(kind)
        if function is not None:
            seen[kind.__qualname__].append(code_fact(function))
    for name, codes in seen.items():
        yield f"code of {name}", " and ".join(codes)


def _is_torchs(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:8]


def _phase_fact(phase: Phase) -> str:
    clip = "" if phase.clip_grad_norm is None else f", gradients clipped at {phase.clip_grad_norm:g}"
    return " and ".join(map(_optimizer_fact, phase.optimizers)) + clip


def _optimizer_fact(optimizer: Optimizer) -> str:
    """With the options that decide what it keeps and which operators it runs; schedulers move how large they are."""
    groups = [(len(group["params"]), _options(group)) for group in optimizer.param_groups]
    if len({options for _, options in groups}) == 1:
        groups = [(sum(count for count, _ in groups), groups[0][1])]
    listed = " and ".join(f"{count} parameters" + (f" ({options})" if options else "") for count, options in groups)
    return f"{type(optimizer).__name__} of {listed}"


def _options(group: Mapping[str, Any]) -> str:
    chosen = [f"{'' if group[word] else 'not '}{word}" for word in _CHOICES if group.get(word) is not None]
    return ", ".join((*chosen, *(word for word in _SWITCHES if group.get(word))))
