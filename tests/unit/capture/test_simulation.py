from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit import CannotSimulate, Step
from memfit.capture.simulation import built_without_memory


def step_of(net: nn.Module, batch: torch.Tensor, loss: Any = None) -> Step:
    return Step(net, loss or (lambda m, x: m(x).pow(2).mean()), torch.optim.AdamW(net.parameters()), batch)


def test_a_value_that_is_needed_names_the_line_and_the_way_out() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).mean()
        return out * 2 if out.item() > 0 else out

    with pytest.raises(CannotSimulate) as caught:
        memfit.profile(step_of(nn.Linear(4, 4), torch.ones(2, 4), loss), simulate=True)
    line = loss.__code__.co_firstlineno + 2
    assert f"test_simulation.py:{line} needs the values of a tensor" in str(caught.value)
    assert "memfit profile without --simulate (in Python: memfit.profile(step)) measures it as it is" in str(caught.value)
    assert "plan, check and fit need a simulation: return the tensor and look at its value after the step" in str(caught.value)
    assert memfit.profile(step_of(nn.Linear(4, 4), torch.ones(2, 4), loss)).peak_bytes > 0


def test_a_layer_that_is_skipped_now_and_then_counts_as_taken() -> None:
    class Skipping(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.layers, self.rate = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), rate

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if not (torch.rand([]) < self.rate):
                    x = torch.tanh(layer(x))
            return x

    never, seldom = (memfit.profile(step_of(Skipping(rate), torch.ones(8, 32)), simulate=True).peak_bytes for rate in (0.0, 0.2))
    assert never == seldom


def test_a_step_built_without_memory_has_fake_tensors_and_the_same_ledger() -> None:
    build = lambda: step_of(nn.Linear(256, 256), torch.ones(64, 256))  # noqa: E731
    fake = built_without_memory(build)
    assert all(isinstance(p, FakeTensor) for p in fake.models[""].parameters())
    assert memfit.profile(fake, simulate=True).by_category == memfit.profile(build(), simulate=True).by_category


def test_layers_that_were_copied_while_they_were_built_count_once() -> None:
    """A copied fake tensor brings a copy of its mode, and was made again beside itself."""

    def build() -> Step:
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        return step_of(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.ones(2, 8, 32))

    fake, real = (memfit.profile(step, simulate=True) for step in (built_without_memory(build), build()))
    assert fake.by_category == real.by_category and fake.peak_bytes == real.peak_bytes


def test_a_factory_that_needs_values_is_built_for_real() -> None:
    def build() -> Step:
        width = int(torch.tensor([4, 8]).sum().sqrt().item())
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        assert rates[-1] == 0.5
        return step_of(nn.Linear(4, width), torch.ones(2, 4))

    step = built_without_memory(build)
    assert memfit.profile(step, simulate=True).by_category["parameters"] == 4 * (4 * 3 + 3)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        net, batch = nn.Linear(1024, 1024), torch.empty(512, 1024)
    ledger = memfit.profile(step_of(net, batch), simulate=True, device="cpu")
    assert ledger.by_category["parameters"] == 4 * (1024 * 1024 + 1024)
    assert all(p.device.type == "meta" for p in net.parameters())


class Experts(torch.nn.Module):
    """Rows sorted by expert, one matrix each, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([4, 8, 12], dtype=torch.int32)
        return torch._grouped_mm(x * 2, self.weight, offs=ends) * torch.ones(12, 32)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_products_of_groups_in_float32_are_simulated_as_they_run() -> None:
    net = Experts()
    step = Step(net, lambda model, x: model(x).square().mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(12, 64))
    assert memfit.profile(step, simulate=True).peak_bytes == memfit.profile(step).peak_bytes


def test_an_optimizer_of_unknown_make_is_warmed_up() -> None:
    class Thrifty(torch.optim.Optimizer):
        """Its first step is unlike the others: it keeps a state only from then on."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if "square" in self.state[p]:
                    p.data.addcdiv_(p.grad, self.state[p]["square"].sqrt() + 1, value=-0.1)
                self.state[p]["square"] = p.grad * p.grad

    net = nn.Linear(64, 64)
    step = Step(net, lambda m, x: m(x).pow(2).mean(), Thrifty(net.parameters()), torch.randn(4, 64))
    real, fake = memfit.profile(step), memfit.profile(step, simulate=True)
    assert abs(real.peak_bytes - fake.peak_bytes) <= 64  # a scalar or two
    assert fake.by_category["optimizer"] == 4 * (64 * 64 + 64)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adafactor([q for q in p if q.dim() == 2]),
    ],
)
def test_one_simulated_step_tells_the_steady_one_for_torchs_optimizers(make: Any) -> None:
    net = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 16))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), make(list(net.parameters())), torch.randn(8, 128))
    real, fake = memfit.profile(step), memfit.profile(step, simulate=True)
    assert real.by_category["optimizer"] == fake.by_category["optimizer"]
    assert abs(fake.peak_bytes - real.peak_bytes) <= 0.01 * real.peak_bytes
    step.run(step.batch)  # and from an optimizer that already has its states
    assert memfit.profile(step, simulate=True).peak_bytes == fake.peak_bytes


TOO_LARGE = """
import torch
from torch import nn
from memfit import Step

def make_step():
    net = nn.Sequential(nn.Conv3d(1, 32, 3, padding=1), *(
        m for _ in range(14) for m in (nn.Conv3d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU())))
    return Step(net, lambda m, x: (m(x) - x).abs().mean(), torch.optim.AdamW(net.parameters()), torch.zeros(8, 1, 128, 192, 192))
"""
WATCHED = """
import json, os, sys, torch
from pathlib import Path
def mark():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
idle, started = mark(), sum(os.times()[:4])
import memfit
from memfit.commands.target import load_step
ledger = memfit.profile(load_step("too_large.py:make_step", simulate=True), simulate=True)
print(json.dumps({"above": mark() - idle, "seconds": sum(os.times()[:4]) - started, "peak": ledger.peak_bytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to read the high-water mark")
def test_a_step_that_could_never_run_here(tmp_path: Path) -> None:
    """200 GiB and more, with a cold cache of workspaces, in little memory and a few seconds of processors' time."""
    import json

    (tmp_path / "too_large.py").write_text(TOO_LARGE)
    environment = {"MEMFIT_CACHE": str(tmp_path / "cache"), "PATH": "", "HOME": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    assert told["peak"] > 200 * 2**30 > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert told["above"] < 300 * 2**20
    assert told["seconds"] < 20
