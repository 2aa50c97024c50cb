"""Over random small networks: what is predicted is what happens, and nothing is changed by looking."""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import Step
from memfit.capture.memory_events import MemoryEvents, peak_of

WIDTHS = st.sampled_from([4, 8, 16])
KINDS = ["conv", "strided", "norm", "batch_norm", "relu_", "silu", "dropout", "residual", "pool"]
LAYERS = st.lists(st.sampled_from(KINDS), min_size=1, max_size=7)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x))


def layer(kind: str, width: int) -> nn.Module:
    return {
        "conv": lambda: nn.Conv2d(width, width, 3, padding=1),
        "strided": lambda: nn.Conv2d(width, width, 3, stride=2, padding=1),
        "norm": lambda: nn.GroupNorm(2, width),
        "batch_norm": lambda: nn.BatchNorm2d(width),
        "relu_": lambda: nn.ReLU(inplace=True),
        "silu": nn.SiLU,
        "dropout": lambda: nn.Dropout(0.3),
        "residual": lambda: Residual(width),
        "pool": lambda: nn.AvgPool2d(2, ceil_mode=True),
    }[kind]()


def random_step(kinds: list[str], width: int, batch: int, frozen: bool, optimizer: str) -> Step:
    torch.manual_seed(len(kinds))
    body = nn.Sequential(*(layer(kind, width) for kind in kinds))
    if frozen:
        body.requires_grad_(False)
    net = nn.Sequential(nn.Conv2d(3, width, 1), body, nn.Conv2d(width, 3, 1))
    made: Any = {"sgd": lambda p: torch.optim.SGD(p, 0.1), "adamw": torch.optim.AdamW}[optimizer](net.parameters())
    return Step(net, lambda m, x: m(x).pow(2).mean(), made, torch.randn(batch, 3, 24, 24))


def truth(step: Step) -> int:
    """The last of three plain steps, by torch's allocator; what exists before it is counted by hand."""
    step.run(step.batch)
    step.run(step.batch)
    for optimizer in step.optimizers:
        optimizer.zero_grad()
    tensors = [step.batch, *step.models[""].parameters(), *step.models[""].buffers()]
    tensors += [t for state in step.optimizers[0].state.values() for t in state.values()]
    gc.collect()  # what another example left must not be freed inside
    with MemoryEvents() as events:
        events.marker()
        step.run(step.batch)
    return sum(t.untyped_storage().nbytes() for t in tensors) + peak_of(events.sections()[-1])


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(LAYERS, WIDTHS, st.sampled_from([1, 2, 5]), st.booleans(), st.sampled_from(["sgd", "adamw"]))
def test_the_prediction_is_the_truth(kinds: list[str], width: int, batch: int, frozen: bool, optimizer: str) -> None:
    predicted = memfit.profile(random_step(kinds, width, batch, frozen, optimizer), simulate=True)
    expected = truth(random_step(kinds, width, batch, frozen, optimizer))
    assert abs(predicted.peak_bytes - expected) <= 0.01 * expected + 1024
    assert predicted.low_bytes - 1024 <= expected <= predicted.high_bytes + 1024
    assert sum(predicted.by_category.values()) == predicted.peak_bytes
