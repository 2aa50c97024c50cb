"""What memfit does on a torch that lacks a private name: each is taken away here, as a release of torch might."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit import torch_private
from memfit.capture.simulation import fake_mode
from memfit.levers import CannotApply
from memfit.levers.compile import CompileLever
from memfit.levers.microbatch import MicroBatch
from memfit.ops.draws import NotReplayable
from memfit.ops.replay import _generator_of
from memfit.records import Option
from small_steps import convolutional_2d, dense


def test_whether_a_simulation_runs_is_known_without_torchs_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert not torch_private.simulating()
        with fake_mode():
            assert torch_private.simulating()
        monkeypatch.delattr("torch._guards.detect_fake_mode", raising=False)


def test_without_the_base_class_the_norms_of_torch_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.nn.modules.batchnorm._BatchNorm")
    monkeypatch.delattr("torch.nn.modules.instancenorm._InstanceNorm")
    assert all(isinstance(norm, torch_private.batch_norms()) for norm in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)))
    assert all(isinstance(norm, torch_private.instance_norms()) for norm in (nn.InstanceNorm1d(2), nn.InstanceNorm3d(2)))
    with pytest.raises(CannotApply, match="normalises with the statistics of the whole batch"):
        MicroBatch().apply(convolutional_2d(), Option("microbatch", "", "reordered", {"sizes": [1, 1]}))


def test_hooks_on_an_optimizers_step_are_seen_and_expected_where_torch_does_not_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert not torch_private.hooks_on_steps(optimizer)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *args: None)
        assert torch_private.hooks_on_steps(optimizer)
        handle.remove()
    monkeypatch.delattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks")
    assert torch_private.hooks_on_steps(optimizer)


def test_what_cannot_be_fused_is_said_beforehand_or_by_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_numbers = torch.zeros(1, dtype=torch.int64)
    assert "fused" in torch_private.why_not_fused(whole_numbers, cuda=True)
    assert torch_private.why_not_fused(torch.zeros(1), cuda=True) == ""
    monkeypatch.delattr(sys.modules["torch.optim.optimizer"], "_device_dtype_check_for_fused")
    assert torch_private.why_not_fused(whole_numbers, cuda=True) == ""


def test_draws_on_mps_are_refused_where_their_state_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.mps._get_default_mps_generator")
    with pytest.raises(NotReplayable, match="does not let anyone see the state of the random numbers on MPS"):
        _generator_of(([2],), {"device": "mps"})


def test_compile_is_refused_where_the_compiler_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    monkeypatch.delattr(torch._dynamo, "lookup_backend")
    with pytest.raises(CannotApply, match="does not give its compiler under the name we know: leave out compile"):
        CompileLever().apply(dense(), Option("compile", "", "reordered", {"modules": [""], "budget": 1.0}))


def test_a_torch_without_fake_tensors_is_refused_at_once_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    spec = importlib.util.find_spec("memfit.torch_private")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"Install a torch from 2\.9 to 2\.13, or a newer memfit"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
