"""What memfit uses of torch that is not public, in one place, and what is done where a torch does not have it.

Fake tensors, dispatch modes and the key under which writes are counted have no substitute: a torch without them is refused at once. All
else is looked up when it is used, and has something to fall back on. (Numbers of autograd's nodes: `capture/autograd_nodes.py`.)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

try:
    from torch._C import DispatchKey, _dispatch_tls_is_dispatch_key_excluded, _dispatch_tls_set_dispatch_key_excluded
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as missing:
    raise ImportError(
        f"memfit is tested with torch 2.13, and torch {torch.__version__} lacks something it cannot do without ({missing}). "
        "Install a torch from 2.9 to 2.13, or a newer memfit."
    ) from missing

__all__ = [
    "NEEDS_VALUES",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "batch_norms",
    "compiler",
    "compiler_failures",
    "compiler_settings",
    "default_mps_generator",
    "detached",
    "hooks_on_steps",
    "instance_norms",
    "references",
    "simulating",
    "step_hooks",
    "why_not_fused",
    "without_modes",
]

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What an operator raises that cannot do without the values of a fake tensor."""


def simulating() -> bool:
    """Whether a tensor made now would have a shape but no memory."""
    detect = _found("torch._guards", "detect_fake_mode")
    return isinstance(torch.empty(0), FakeTensor) if detect is None else detect(()) is not None


def without_modes() -> AbstractContextManager[Any] | None:
    """Real operators in the midst of a simulation; None where there is no way to it."""
    disabled = _found("torch.utils._python_dispatch", "_disable_current_modes")
    return None if disabled is None else disabled()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its place in the graph, but with the same count of writes: inside an operator, `detach` alone would begin a new one."""
    key = DispatchKey.ADInplaceOrView
    if not _dispatch_tls_is_dispatch_key_excluded(key):
        return tensor.detach()
    _dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return tensor.detach()
    finally:
        _dispatch_tls_set_dispatch_key_excluded(key, True)


def references(args: Sequence[Any]) -> tuple[int, int, int] | None:
    """How many hold an operator's first argument in torch, its storage and it in Python, the question itself included; None if not told."""
    of_storage = getattr(torch._C, "_storage_Use_Count", None)
    if of_storage is None or not hasattr(args[0], "_use_count"):
        return None
    return args[0]._use_count(), of_storage(args[0].untyped_storage()._cdata), sys.getrefcount(args[0])


def default_mps_generator() -> torch.Generator | None:
    """None where there is no way to it: its draws cannot be replayed then."""
    found = _found("torch.mps", "_get_default_mps_generator")
    return None if found is None else found()


def batch_norms() -> tuple[type[nn.Module], ...]:
    """What every BatchNorm is, or those that torch has."""
    base = _found("torch.nn.modules.batchnorm", "_BatchNorm")
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm) if base is None else (base,)


def instance_norms() -> tuple[type[nn.Module], ...]:
    """What every InstanceNorm is, or those that torch has."""
    base = _found("torch.nn.modules.instancenorm", "_InstanceNorm")
    return (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) if base is None else (base,)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any] | None:
    """What hangs on this optimizer's step, or on every optimizer's; None where it cannot be seen."""
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    everyones = (_found("torch.optim.optimizer", f"_global_optimizer_{when}_hooks") for when in ("pre", "post"))
    found = [*own, *everyones]
    return None if None in found else [hook for hooks in found for hook in hooks.values()]


def hooks_on_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything hangs on this optimizer's step, or on every optimizer's; what cannot be seen may be there."""
    return step_hooks(optimizer) != []


def why_not_fused(parameter: torch.Tensor, *, cuda: bool) -> str:
    """What torch says to a fused update of this parameter; "" where it does not mind, or says so only at the first step."""
    check = _found("torch.optim.optimizer", "_device_dtype_check_for_fused")
    try:
        if check is not None:
            check(parameter, cuda_unsupported=not cuda)
    except RuntimeError as error:
        return str(error)
    return ""


def compiler() -> Any:
    """inductor, as torch.compile's backends are called, or None."""
    lookup = _found("torch._dynamo", "lookup_backend")  # takes a second, and only those wait for it who compile
    return None if lookup is None else lookup("inductor")


def compiler_settings() -> tuple[Any, Any]:
    """The modules of settings of autograd's partitioner and of inductor; None for one that is not there."""
    return _module("torch._functorch.config"), _module("torch._inductor.config")


def compiler_failures() -> tuple[type[Exception], ...]:
    """What is raised where a model does not compile."""
    return (_found("torch._dynamo.exc", "BackendCompilerFailed") or RuntimeError,)


def _found(module: str, name: str) -> Any:
    return getattr(_module(module), name, None)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
