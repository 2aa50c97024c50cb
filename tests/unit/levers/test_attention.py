"""attention: known libraries attend without a map, with the same gradients; others are told how to be described."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Step
from memfit.levers import CannotApply, attention
from memfit.levers.attention import Attention, describe_attention
from small_steps import dense

LEVER = Attention()


@pytest.fixture(autouse=True)
def _undescribed() -> Iterator[None]:
    before = dict(attention._DESCRIBED)
    yield
    attention._DESCRIBED.clear()
    attention._DESCRIBED.update(before)


def step_of(net: nn.Module, width: int = 32, tokens: int = 256) -> Step:
    return Step(net, lambda m, x: (m(x) - x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, tokens, width))


def monai(dropout: float = 0.0, **options: Any) -> Step:
    selfattention = pytest.importorskip("monai.networks.blocks.selfattention")
    return step_of(nn.Sequential(nn.Linear(32, 32), selfattention.SABlock(32, 4, dropout, **options), nn.Linear(32, 32)))


def monai_with_dropout() -> Step:
    return monai(0.1)


def monai_causal() -> Step:
    return monai(causal=True, sequence_length=256)


def diffusers() -> Step:
    library = pytest.importorskip("diffusers.models.attention_processor")
    return step_of(nn.Sequential(library.Attention(32, heads=4, dim_head=8, processor=library.AttnProcessor()), nn.Linear(32, 32)))


def gpt2(dropout: float = 0.0) -> Step:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, attn_implementation="eager"))
    return Step(net, lambda m, t: m(t, labels=t).loss, torch.optim.SGD(net.parameters(), 0.1), torch.randint(0, 50, (4, 128)))


def gpt2_with_dropout() -> Step:
    return gpt2(0.1)


class Attends(nn.Module):
    def __init__(self, dropout: float = 0.0, reads_weights: bool = False) -> None:
        super().__init__()
        self.inner, self.reads_weights = nn.MultiheadAttention(32, 4, dropout, batch_first=True), reads_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, weights = self.inner(x, x, x)
        return out * weights.mean() if self.reads_weights else out


def multihead() -> Step:
    return step_of(Attends())


def encoder_with_dropout() -> Step:
    return step_of(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True))


STEPS = (monai, monai_with_dropout, monai_causal, diffusers, gpt2, gpt2_with_dropout, multihead, encoder_with_dropout)


def gradients(step: Step, model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    step.all_phases[0].loss(model, step.batch, {}).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_the_law_and_the_same_training(make: Callable[[], Step]) -> None:
    step = make()
    expected = gradients(step, copy.deepcopy(step.model))
    before = memfit.profile(step, simulate=True)
    for option in LEVER.options(before):
        told = LEVER.rewrite(before, option)
        with LEVER.apply(step, option):
            seen = memfit.profile(step, simulate=True)
            found = gradients(step, step.model)
        assert seen.peak_bytes < before.peak_bytes
        assert told.peak_bytes == pytest.approx(seen.peak_bytes, abs=0.02 * before.peak_bytes)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(float(g.abs().max()) for g in expected))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_checkpointed_attend_alike_when_they_run_again(dropout: float, reentrant: bool) -> None:
    step = gpt2(dropout)
    step.models[""].gradient_checkpointing_enable({"use_reentrant": reentrant})
    step.models[""].enable_input_require_grads()  # without it, checkpoints that reenter find nothing to differentiate
    expected, given = gradients(step, step.model), LEVER.options(memfit.profile(step, simulate=True))
    assert len(given) == 2
    for option in given:
        with LEVER.apply(step, option):
            found = gradients(step, step.model)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(float(g.abs().max()) for g in expected))


class Fuses(nn.Module):
    """Calls torch's fused attention, which writes its map out with dropout on a CPU; it may checkpoint that by itself."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.qkv, self.reentrant = nn.Linear(32, 96), reentrant

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*self.qkv(x)[:, None].chunk(3, -1), dropout_p=0.1)[:, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x) if self.reentrant is None else checkpoint(self.attend, x, use_reentrant=self.reentrant)


class Checkpoints(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_checkpoint_around_a_module_makes_no_difference() -> None:
    step = step_of(nn.Sequential(nn.Linear(32, 32), Checkpoints(Fuses())))
    expected, given = gradients(step, step.model), LEVER.options(memfit.profile(step, simulate=True))
    for option in given:
        with LEVER.apply(step, option):
            found = gradients(step, step.model)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_module_is_refused_while_it_runs(reentrant: bool) -> None:
    step = step_of(nn.Sequential(nn.Linear(32, 32), Fuses(reentrant)))
    for option in LEVER.options(memfit.profile(step, simulate=True)):
        with LEVER.apply(step, option), pytest.raises(CannotApply, match=r"Fuses checkpoints .* its own forward.*describe_attention"):
            step.run(step.batch)
    assert step.run(step.batch)  # without it, all is as before


def test_only_maps_are_offered_for() -> None:
    assert LEVER.options(memfit.profile(dense(), simulate=True)) == []


@pytest.mark.parametrize("make", [monai, diffusers, gpt2, multihead], ids=lambda make: make.__name__)
def test_undo_restores_the_same_objects(make: Callable[[], Step]) -> None:
    step = make()
    configs = [m.config._attn_implementation for m in step.models[""].modules() if hasattr(m, "config")]
    before, sdpa = [dict(vars(m)) for m in step.models[""].modules()], nn.functional.scaled_dot_product_attention
    with LEVER.apply(step, LEVER.options(memfit.profile(step, simulate=True))[0]):
        step.run(step.batch)
    assert [dict(vars(m)) for m in step.models[""].modules()] == before
    assert configs == [m.config._attn_implementation for m in step.models[""].modules() if hasattr(m, "config")]
    assert nn.functional.scaled_dot_product_attention is sdpa


def test_weights_that_are_read_are_not_made_up() -> None:
    step = step_of(Attends(reads_weights=True))
    with LEVER.apply(step, LEVER.options(memfit.profile(step, simulate=True))[0]), pytest.raises(CannotApply, match="need_weights=False"):
        step.run(step.batch)
    assert step.run(step.batch)  # without it, all is as before


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 32**0.5).softmax(-1) @ v


def test_a_module_nobody_described_is_named_and_one_that_is_works() -> None:
    step = step_of(nn.Sequential(nn.Linear(32, 32), Mine()))
    option = LEVER.options(memfit.profile(step, simulate=True))[1]
    with pytest.raises(CannotApply, match=r"no adapter for '1'.*describe_attention\(YourModule, adapter\)"):
        LEVER.apply(step, option)
    describe_attention(Mine, lambda module, attend: lambda x: attend(*module.qkv(x).chunk(3, -1)))  # type: ignore[operator]
    expected = gradients(step, step.model)
    with LEVER.apply(step, option):
        found = gradients(step, step.model)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))
    describe_attention(Mine, lambda module, attend: lambda x: attend(*module.qkv(x).chunk(3, -1), scale=1.0))  # type: ignore[operator]
    with LEVER.apply(step, option):  # the broken twin
        found = gradients(step, step.model)
    assert not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_a_block_that_keeps_its_map_is_left_alone() -> None:
    step = monai(save_attn=True)
    with pytest.raises(CannotApply, match="no adapter for '1'"):
        LEVER.apply(step, LEVER.options(memfit.profile(step, simulate=True))[0])


class OnlyEager(nn.Module):
    """A model of transformers whose attention has no fused form, and says so."""

    class Config:
        _attn_implementation = _attn_implementation_internal = "eager"

    def __init__(self) -> None:
        super().__init__()
        self.config, self.inner = self.Config(), nn.Linear(32, 32)

    def set_attn_implementation(self, implementation: str) -> None:
        self.config._attn_implementation = implementation
        raise ValueError(f"OnlyEager does not support {implementation} yet.\nPlease open an issue.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.inner(x) @ x.transpose(1, 2), -1) @ x  # type: ignore[no-any-return]


def test_a_model_without_fused_attention_is_refused_and_left_as_it_was() -> None:
    step = step_of(OnlyEager())
    option = LEVER.options(memfit.profile(step, simulate=True))[0]
    with pytest.raises(CannotApply, match=r"attention cannot join OnlyEager.*OnlyEager does not support sdpa yet\. Leave out this lever"):
        LEVER.apply(step, option)
    assert step.model.config._attn_implementation_internal == "eager"  # type: ignore[union-attr]
    assert "forward" not in step.model.__dict__  # type: ignore[union-attr]
