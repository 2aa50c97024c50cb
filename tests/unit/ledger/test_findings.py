"""Each root cause is found in a step that has it, and not in its twin that does the same work without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.ledger import account
from memfit.records import Finding, Ledger, Process, Trace

MIB = 2**20
E = 512


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces measured here are not left behind."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))


class Part(nn.Module):
    """A module that does what it is told to."""

    def __init__(self, work: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.work, self.layers = work, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        """The given work on the given layers."""
        return self.work(*self.layers, *inputs)


def step_of(
    model: nn.Module | dict[str, nn.Module], batch: Any, loss: Callable[..., Any] | None = None, optimizer: Any = torch.optim.SGD
) -> memfit.Step:
    """A step with the mean square of the model's output as its loss."""
    modules = [model] if isinstance(model, nn.Module) else list(model.values())
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    return memfit.Step(model, loss or (lambda model, batch: model(batch).square().mean()), optimizer(trained, lr=0.1), batch)


def ledger_of(step: memfit.Step, device: str | None = None, **changes: Any) -> Ledger:
    """The ledger of a simulated step, with changes made to its trace."""
    trace = memfit.profile(step, simulate=True, device=device).trace
    assert isinstance(trace, Trace)
    return account(replace(trace, **changes))


def found(kind: str, step: memfit.Step, device: str | None = None, **changes: Any) -> list[Finding]:
    """The findings of one kind."""
    return [finding for finding in ledger_of(step, device, **changes).findings if finding.kind == kind]


def line_of(function: Callable[..., Any], text: str) -> str:
    """Where a text stands in this file, as findings say it."""
    lines, first = inspect.getsourcelines(function)
    return f"{Path(__file__).name}:{first + next(n for n, line in enumerate(lines) if text in line)}"


# --- outer products ---------------------------------------------------------------------------------------------------


def einsum(layer: nn.Module, batch: Tensor) -> Any:
    """Every class embedding times itself."""
    c = layer(batch)
    return torch.einsum("bi,bj->bij", c, c).sin()


def batched_product(layer: nn.Module, batch: Tensor) -> Any:
    """The same by a batched matrix product."""
    c = layer(batch)
    return (c.unsqueeze(2) @ c.unsqueeze(1)).sin()  # outer


def repeated_product(layer: nn.Module, batch: Tensor) -> Any:
    """The same by copies."""
    c = layer(batch)
    rows, columns = c.unsqueeze(2).repeat(1, 1, E), c.unsqueeze(1).repeat(1, E, 1)
    return (rows * columns).sin()  # outer


@pytest.mark.parametrize("work, text", [(einsum, "torch.einsum"), (batched_product, "# outer"), (repeated_product, "# outer")])
def test_an_outer_product_is_told_once_at_its_line(work: Callable[..., Any], text: str) -> None:
    (finding,) = found("outer_product", step_of(Part(work, nn.Linear(8, E)), torch.randn(4, 8)))
    assert finding.where.endswith(line_of(work, text))
    assert "\N{MULTIPLICATION SIGN}512 " in finding.why
    assert finding.bytes >= 4 * E * E * 4 and finding.bytes % (4 * E * E * 4) == 0
    assert finding.lever == "outer_product"


def test_an_outer_product_in_every_layer_is_told_once() -> None:
    layers = nn.Sequential(*(Part(lambda layer, x: (einsum(layer, x)).mean(-1), nn.Linear(E, E)) for _ in range(3)))
    (finding,) = found("outer_product", step_of(layers, torch.randn(4, E)))
    assert "3 times" in finding.why and finding.where.startswith("* (")


def test_a_product_that_passes_is_told_as_gone_by_the_peak() -> None:
    def passing(layer: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            some = x[:8].clone()
            scale = torch.einsum("bi,bj->bij", some, some).mean()
        return layer(x).sin().cos().sin().cos().sin().cos().sin() * scale

    step = step_of(Part(passing, nn.Linear(256, 256)), torch.randn(2048, 256))
    (finding,) = found("outer_product", step)
    assert finding.bytes == 8 * 256 * 256 * 4 and "gone by the peak" in finding.why


def factored(layer: nn.Module, batch: Tensor) -> Any:
    """The row sums of the outer product without making it."""
    c = layer(batch)
    return c * c.sum(1, keepdim=True)


@pytest.mark.parametrize(
    "work, layers, batch",
    [
        (factored, [nn.Linear(8, E)], torch.randn(4, 8)),
        (lambda linear, x: linear(x), [nn.Linear(8, E)], torch.randn(512, 8)),
        (lambda linear, x: linear(x), [nn.Linear(1, E, bias=False)], torch.randn(512, 1)),
        (lambda conv, x: conv(x), [nn.Conv2d(1, 256, 3, padding=1)], torch.randn(2, 1, 32, 32)),
        (lambda conv, x: F.interpolate(conv(x), scale_factor=8), [nn.Conv2d(3, 8, 1)], torch.randn(2, 3, 16, 16)),
        (lambda conv, x: F.pad(conv(x), (32, 32, 32, 32)), [nn.Conv2d(3, 8, 1)], torch.randn(2, 3, 16, 16)),
        (lambda linear, x: F.gelu(linear(x)), [nn.Linear(64, 64)], torch.randn(512, 64)),
        (lambda linear, x: linear(x).unsqueeze(1).expand(-1, 64, -1).mean(1), [nn.Linear(64, 64)], torch.randn(512, 64)),
        (lambda embedding, x: embedding(x), [nn.Embedding(10, E)], torch.randint(0, 10, (4, 512))),
    ],
    ids=["factored", "linear", "one channel", "convolution", "upsampling", "padding", "gelu", "expand", "embedding"],
)
def test_layers_that_only_widen_are_no_outer_products(work: Callable[..., Any], layers: Sequence[nn.Module], batch: Tensor) -> None:
    assert not found("outer_product", step_of(Part(work, *layers), batch))


def test_a_table_of_differences_is_made_piece_by_piece() -> None:
    def distances(layer: nn.Module, x: Tensor) -> Any:
        z = layer(x)
        return (z[:, None] - z[None]).square().sum(-1)

    (finding,) = found("outer_product", step_of(Part(distances, nn.Linear(16, 16)), torch.randn(256, 16)))
    assert finding.lever == "chunk" and "\N{MULTIPLICATION SIGN}256 " in finding.why


# --- attention maps ---------------------------------------------------------------------------------------------------


def heads(qkv: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of four heads."""
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
    return q, k, v


def materialised(qkv: nn.Module, x: Tensor) -> Any:
    """Attention as in the books, with a mask."""
    q, k, v = heads(qkv, x)
    scores = q @ k.transpose(-1, -2) / 4
    scores = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -1e9)
    return x + (F.dropout(scores.softmax(-1), 0.1) @ v).transpose(1, 2).flatten(2)


def fused(qkv: nn.Module, x: Tensor, dropout: float = 0.0) -> Any:
    """Attention by torch's own function."""
    return x + F.scaled_dot_product_attention(*heads(qkv, x), dropout_p=dropout).transpose(1, 2).flatten(2)


def with_dropout(qkv: nn.Module, x: Tensor) -> Any:
    """Attention by torch's own function, which writes its maps out on a CPU."""
    return fused(qkv, x, 0.1)


def attention_step(work: Callable[..., Any]) -> memfit.Step:
    """Three layers of attention over 128 tokens."""
    return step_of(nn.Sequential(*(Part(work, nn.Linear(64, 192)) for _ in range(3))), torch.randn(2, 128, 64))


@pytest.mark.parametrize("work", [materialised, with_dropout])
def test_attention_maps_are_counted_over_layers(work: Callable[..., Any]) -> None:
    (finding,) = found("attention_map", attention_step(work))
    one = 2 * 4 * 128 * 128 * 4
    assert finding.why.startswith("3 attention maps of 128\N{MULTIPLICATION SIGN}128 are")
    assert finding.where.startswith("* (") and finding.lever == "attention"
    assert finding.bytes >= 3 * 3 * one  # probabilities, dropout's mask, dropout's result
    assert not found("outer_product", attention_step(work))


def test_fused_attention_has_no_maps() -> None:
    assert not found("attention_map", attention_step(fused))
    assert not found("attention_map", attention_step(with_dropout), device="cuda")


def test_class_probabilities_are_no_attention_map() -> None:
    step = step_of(nn.Sequential(nn.Linear(64, 256, bias=False), nn.Softmax(-1)), torch.randn(4, 128, 64))
    assert not found("attention_map", step)


# --- what autograd keeps ----------------------------------------------------------------------------------------------


def decoder_step(frozen: bool, pieces: int = 1) -> memfit.Step:
    """A trained projection, then a decoder; the batch goes through it in pieces."""
    decoder = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
    models = {"projection": nn.Conv2d(3, 8, 1), "decoder": decoder.requires_grad_(not frozen)}

    def loss(models: dict[str, nn.Module], batch: Tensor) -> Any:
        parts = [models["decoder"](part).square().mean() for part in models["projection"](batch).chunk(pieces)]
        return torch.stack(parts).mean()

    return step_of(models, torch.randn(4, 3, 32, 32), loss)


def test_activations_of_a_frozen_part() -> None:
    (finding,) = found("frozen_activations", decoder_step(frozen=True))
    one = 4 * 8 * 32 * 32 * 4
    assert finding.where == "decoder" and finding.lever == "saved"
    assert finding.bytes >= 3 * one
    assert "inputs of convolutions" in finding.why and "(chunk)" in finding.why
    assert not found("frozen_activations", decoder_step(frozen=False))


def test_a_frozen_part_called_for_every_piece() -> None:
    (finding,) = found("frozen_activations", decoder_step(frozen=True, pieces=4))
    assert "called 4 times" in finding.why


def deep(samples: int, width: int = 256) -> memfit.Step:
    """A few layers with little to keep but activations."""
    layers = [layer for _ in range(4) for layer in (nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())]
    return step_of(nn.Sequential(*layers), torch.randn(samples, 8, width))


def test_activations_for_every_sample() -> None:
    ledger = ledger_of(deep(8))
    (finding,) = [f for f in ledger.findings if f.kind == "batch_activations"]
    assert finding.lever == "microbatch" and "all 8 samples" in finding.why
    assert 0.25 * ledger.peak_bytes <= finding.bytes <= ledger.by_category["activations"]
    assert not found("batch_activations", deep(1))


@pytest.mark.parametrize(("training", "lever"), [(True, "saved"), (False, "microbatch")])
def test_a_batch_that_is_normalised_as_one_is_not_to_be_divided(training: bool, lever: str) -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.SiLU())]
    (finding,) = found("batch_activations", step_of(nn.Sequential(*layers).train(training), torch.randn(8, 8, 256)))
    assert finding.lever == lever and ("BatchNorm needs the whole batch" in finding.why) == training


def test_instance_norm_does_not_need_the_whole_batch() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Conv1d(8, 8, 3, padding=1), nn.InstanceNorm1d(8), nn.SiLU())]
    (finding,) = found("batch_activations", step_of(nn.Sequential(*layers), torch.randn(8, 8, 256)))
    assert finding.lever == "microbatch"


def test_activations_that_are_cheap_to_make_again() -> None:
    (finding,) = found("cheap_activations", deep(8))
    assert finding.lever == "saved" and "native_group_norm" in finding.why
    assert finding.bytes >= 7 * 8 * 8 * 256 * 4
    only_products = step_of(nn.Sequential(*(nn.Conv1d(8, 8, 3, padding=1) for _ in range(6))), torch.randn(8, 8, 256))
    assert not found("cheap_activations", only_products)


def test_a_sum_with_a_result_that_nobody_keeps_is_not_cheap() -> None:
    residual = nn.Sequential(*(Part(lambda conv, x: x + conv(x), nn.Conv1d(8, 8, 3, padding=1)) for _ in range(6)))
    assert not found("cheap_activations", step_of(residual, torch.randn(8, 8, 256)))


def test_full_precision_where_half_is_cheap() -> None:
    (finding,) = found("full_precision", deep(8), device="cuda")
    assert finding.lever == "precision" and "cuda" in finding.why
    assert not found("full_precision", deep(8))


# --- networks, optimizers, the process --------------------------------------------------------------------------------


def test_optimizer_states() -> None:
    def square(optimizer: Any) -> memfit.Step:
        return step_of(nn.Linear(256, 256), torch.randn(2, 256), optimizer=optimizer)

    (finding,) = found("optimizer_states", square(torch.optim.AdamW))
    assert (finding.where, finding.lever) == ("AdamW", "optimizer")
    assert "exp_avg and exp_avg_sq" in finding.why and "2.0 times" in finding.why
    assert not found("optimizer_states", square(torch.optim.SGD))


def test_a_network_that_only_the_loss_holds() -> None:
    class Perceptual(nn.Sequential):
        """Features to compare."""

    features = Perceptual(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)).requires_grad_(False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1))
    (finding,) = found("side_network", step_of(net, torch.randn(2, 3, 32, 32), lambda model, batch: features(model(batch)).mean()))
    assert finding.where == "Perceptual" and "not trained" in finding.why
    assert finding.bytes >= 2 * 32 * 32 * 32 * 4
    assert not found("side_network", step_of(net, torch.randn(2, 3, 32, 32)))


def test_a_discriminator_beside_the_generator() -> None:
    models = {"generator": nn.Linear(64, 64), "discriminator": nn.Sequential(nn.Linear(64, 32), nn.ReLU())}
    (finding,) = found("side_network", step_of(models, torch.randn(8, 64), lambda m, x: m["discriminator"](m["generator"](x)).mean()))
    assert (finding.where, finding.lever) == ("discriminator", "architecture")


def test_workers_and_pinned_memory_of_the_loader() -> None:
    (finding,) = found("loader", deep(2), process=Process(100 * MIB, workers_bytes=500 * MIB, workers=2, pinned_bytes=8 * MIB))
    assert finding.bytes == 508 * MIB and finding.lever == "loader"
    assert "2 workers (500 MiB)" in finding.why and "pinned" in finding.why
    assert not found("loader", deep(2), process=Process(100 * MIB))


def test_allocator_slack_predicted_and_measured() -> None:
    step = deep(2)
    peak = ledger_of(step).peak_bytes
    (predicted,) = found("allocator_slack", step, process=Process(MIB, slack_bytes=peak // 4))
    assert predicted.bytes == peak // 4 and "expected" in predicted.why and predicted.lever == "allocator"
    seen = Process(MIB, workers_bytes=MIB, measured_bytes=2 * MIB + peak + peak // 10)
    (measured,) = found("allocator_slack", step, process=seen)
    assert measured.bytes == peak // 10 and "seen" in measured.why
    assert not found("allocator_slack", step, process=Process(MIB, slack_bytes=peak // 100))
    assert not found("allocator_slack", step, process=Process(MIB, measured_bytes=MIB))


# --- leaks and the op at the peak -------------------------------------------------------------------------------------


def test_a_tensor_kept_between_steps() -> None:
    history: list[Any] = []

    def leaks(model: nn.Module, batch: Tensor) -> Any:
        history.append(model(batch))
        return history[-1].square().mean()

    (finding,) = found("leak", step_of(nn.Linear(64, 64), torch.randn(32, 64), leaks))
    assert finding.bytes == 32 * 64 * 4 and finding.lever == ""
    assert finding.where.endswith(line_of(leaks, "append")) and ".detach()" in finding.why
    assert not found("leak", step_of(nn.Linear(64, 64), torch.randn(32, 64)))


def test_the_op_at_the_peak() -> None:
    def cube(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).exp().sum()

    (finding,) = found("temporary_peak", step_of(nn.Linear(8, 512), torch.randn(512, 8), cube))
    assert finding.lever == "microbatch" and finding.where
    large = step_of(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.randn(2, 512))
    assert not found("temporary_peak", large)


def test_findings_come_largest_first_and_in_words() -> None:
    findings = ledger_of(attention_step(materialised), "cuda").findings
    assert len(findings) > 3
    assert [f.bytes for f in findings] == sorted((f.bytes for f in findings), reverse=True)
    assert all(f.bytes > 0 and f.where and f.why.endswith(".") for f in findings)
