"""What the recorder writes down, on steps whose memory can be counted by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Step
from memfit.capture import capture
from memfit.capture.memory_events import MemoryEvents, peak_of
from memfit.errors import MemfitError
from memfit.records import Storage, Trace
from small_steps import SMALL_STEPS

BOTH = pytest.mark.parametrize("simulate", [True, False], ids=["simulated", "real"])


def two_layers() -> Step:
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    loss = lambda model, x: model(x).pow(2).mean()  # noqa: E731
    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), torch.randn(4, 16))


def named(trace: Trace, kind: str) -> list[Storage]:
    return [s for s in trace.storages if s.kind == kind]


@BOTH
def test_the_steps_own_tensors_are_labelled(simulate: bool) -> None:
    trace = capture(two_layers(), simulate)
    parameters = 4 * (16 * 32 + 32 + 32 * 8 + 8)
    for kind in ("parameters", "gradients", "optimizer"):
        assert sum(s.bytes for s in named(trace, kind)) == parameters, kind
    assert [s.bytes for s in named(trace, "batch")] == [4 * 4 * 16]
    assert {s.name for s in named(trace, "parameters")} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(s.born == -1 and s.died is None for kind in ("parameters", "optimizer", "batch") for s in named(trace, kind))
    assert all(trace.ops[s.born].phase == "backward" and s.died is None for s in named(trace, "gradients"))


@BOTH
def test_ops_know_module_line_and_phase(simulate: bool) -> None:
    trace = capture(two_layers(), simulate)
    forward = [op for op in trace.ops if op.name == "aten.addmm.default"]
    assert [op.module for op in forward] == ["0", "1"]
    this_line = two_layers.__code__.co_firstlineno + 2  # the loss's own line calls the whole model
    assert {op.source.rpartition(":")[0].rpartition("/")[2] for op in forward} == {"test_capture.py"}
    assert {int(op.source.rpartition(":")[2]) for op in forward} == {this_line}
    phases = list(dict.fromkeys(op.phase for op in trace.ops))
    assert phases == ["forward", "backward", "optimizer"]


@BOTH
def test_a_backward_op_belongs_to_its_forward_op(simulate: bool) -> None:
    trace = capture(two_layers(), simulate)
    products = [op for op in trace.ops if op.name == "aten.mm.default" and op.phase == "backward"]
    assert products and all(op.forward is not None for op in products)
    for op in products:
        assert trace.ops[op.forward or 0].name == "aten.addmm.default"
        assert (op.module, op.source) == (trace.ops[op.forward or 0].module, trace.ops[op.forward or 0].source)


@BOTH
def test_what_autograd_keeps_and_for_which_op(simulate: bool) -> None:
    trace = capture(two_layers(), simulate)
    second = next(i for i, op in enumerate(trace.ops) if op.name == "aten.addmm.default" and op.module == "1")
    hidden = next(i for i, s in enumerate(trace.storages) if s.shape == (4, 32) and s.born >= 0)
    kept = [saved for saved in trace.saved if saved.storage == hidden]
    assert [saved.op for saved in kept] == [second]
    read = kept[0].read
    assert read is not None and trace.ops[read].phase == "backward" and trace.ops[read].forward == second
    assert hidden in trace.ops[second].inputs  # and what it was derived from
    assert hidden in trace.ops[trace.storages[hidden].born].outputs


@BOTH
def test_calls_of_modules_cover_their_ops(simulate: bool) -> None:
    trace = capture(two_layers(), simulate)
    spans = {call.module: (call.first, call.last) for call in trace.calls}
    assert set(spans) == {"", "0", "1"}
    assert spans[""][0] <= spans["0"][0] <= spans["0"][1] < spans["1"][0] <= spans["1"][1] <= spans[""][1]
    assert all(op.module != "0" or spans["0"][0] <= i <= spans["0"][1] for i, op in enumerate(trace.ops) if op.phase == "forward")


def test_real_ops_are_timed_and_simulated_ones_are_not() -> None:
    assert all(op.seconds is not None for op in capture(two_layers()).ops)
    assert all(op.seconds is None for op in capture(two_layers(), simulate=True).ops)


@pytest.mark.parametrize("make", SMALL_STEPS.values(), ids=SMALL_STEPS)
def test_simulated_and_real_storages_agree_to_the_byte(make: Callable[[], Step]) -> None:
    """The highest sum of storages alive, workspaces apart, is the same number of bytes."""
    torch.manual_seed(0)
    real, fake = memfit.profile(make()), memfit.profile(make(), simulate=True)
    assert storages_peak(real.trace) == storages_peak(fake.trace)


def storages_peak(trace: Trace | None) -> int:
    from dataclasses import replace

    from memfit.ledger.timeline import live_bytes

    assert trace is not None
    return int(live_bytes(replace(trace, ops=tuple(replace(op, workspace=0) for op in trace.ops))).max())


@pytest.mark.parametrize("make", SMALL_STEPS.values(), ids=SMALL_STEPS)
def test_the_measured_peak_is_torchs_own(make: Callable[[], Step]) -> None:
    """Against the allocator's events over a program that makes everything inside the session and runs without any recorder."""
    gc.collect()  # what another test left, freed inside the session, would count as less
    with MemoryEvents() as events:
        step = make()
        step.run(step.batch)
        step.run(step.batch)
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        events.marker()
        step.run(step.batch)
    *before, last = events.sections()
    truth = sum(map(sum, before)) + peak_of(last)
    measured = memfit.profile(make()).peak_bytes
    predicted = memfit.profile(make(), simulate=True).peak_bytes
    assert abs(measured - truth) <= 0.001 * truth + 512
    assert abs(predicted - truth) <= 0.01 * truth + 512


def test_memory_events_would_show_a_difference() -> None:
    """The truth the test above leans on moves with a single tensor more."""
    with MemoryEvents() as events:
        events.marker()
        first = torch.empty(1000)
        events.marker()
        second = [torch.empty(1000), torch.empty(1000)]
    small, large = (peak_of(section) for section in events.sections()[1:])
    assert (small, large) == (4000, 8000) and first is not None and len(second) == 2


def test_steps_that_only_now_and_then_free_are_told_from_leaks() -> None:
    kept: list[torch.Tensor] = []

    def leaking(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        kept.append(out)
        return out.pow(2).mean()

    def caching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.zeros(4, 8))
        return (model(x) + kept[0]).pow(2).mean()

    def replacing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept[:] = [model(x)]
        return kept[0].pow(2).mean()

    def in_a_circle(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        circle: list[Any] = [model(x)]
        circle.append(circle)
        return circle[0].pow(2).mean()  # type: ignore[no-any-return]

    net = nn.Linear(16, 8)
    for loss, growth in ((leaking, 4 * 8 * 4), (caching, 0), (replacing, 0), (in_a_circle, 0)):
        for simulate in (True, False):
            kept.clear()
            step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 16))
            assert capture(step, simulate).growth_bytes == growth, (loss.__name__, simulate)


def test_a_network_that_only_the_loss_holds_is_seen() -> None:
    judge = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).requires_grad_(False)
    net = nn.Linear(16, 8)
    step = Step(net, lambda m, x: judge(m(x)).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(4, 16))
    for simulate in (True, False):
        trace = capture(step, simulate)
        outsider = next(model for model in trace.models if model.name == "Sequential")
        assert (outsider.parameters_bytes, outsider.trained, outsider.frozen) == (4 * (8 * 64 + 64 + 64 + 1), False, ("Sequential",))
        weight = next(s for s in trace.storages if s.shape in ((64, 8), (8, 64)) and s.bytes == 4 * 8 * 64)
        assert (weight.born, weight.kind) == (-1, "parameters")


def test_a_device_that_is_not_the_steps_is_refused_for_a_real_run() -> None:
    with pytest.raises(MemfitError, match="This step is built on cpu, so a real run happens there, not on cuda"):
        capture(two_layers(), device="cuda")
    with pytest.raises(MemfitError, match="'abacus' is not a device memfit can simulate: choose one of cpu, cuda, mps"):
        capture(two_layers(), simulate=True, device="abacus")


def test_cuda_is_simulated_with_its_own_kernels() -> None:
    """Dropout keeps a mask of bytes there, fused attention no map, and every block is rounded to 512 bytes."""
    size, heads = 128, 4

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.project(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
            return nn.functional.dropout(out, 0.5)

    net = Attention()
    step = Step(net, lambda m, x: m(x).mean(), torch.optim.AdamW(net.parameters()), torch.randn(2, size, 32))
    cpu, cuda = capture(step, simulate=True), capture(step, simulate=True, device="cuda")
    maps = lambda trace: [s for s in trace.storages if s.shape[-2:] == (size, size)]  # noqa: E731
    assert maps(cpu) and not maps(cuda)
    assert all(s.bytes % 512 == 0 for s in cuda.storages)
    masks: Any = [s for s in cuda.storages if s.dtype == "bool"]
    assert masks and any("_foreach_" in op.name for op in cuda.ops) and not any("_foreach_" in op.name for op in cpu.ops)
    assert "not validated on hardware" in cuda.notes[0] and not cpu.notes


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_checkpoint_runs_its_region_again_with_cudas_kernels(chunks: int) -> None:
    """Torch compares what is kept in both runs, so both must take the same kernels; in chunks gradients are asked for."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), 0.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), Attention()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    net = Net()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return memfit.chunked(lambda part: model(part).mean(), x, size=2 // chunks, parameters=model)

    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 4, 128, 16))
    trace = capture(step, simulate=True, device="cuda")
    attentions = [op for op in trace.ops if op.name == "aten._scaled_dot_product_efficient_attention.default"]
    assert len(attentions) == 2 * 3 * chunks
