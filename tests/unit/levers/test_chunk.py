"""Chunks: the whole batch's gradients through a part that runs in pieces, and the memory that was promised."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Phase, Step
from memfit.levers import LEVERS, CannotApply
from memfit.levers.chunk_line import MARK, regions
from memfit.levers.saved import table_option
from memfit.planner import combining
from memfit.step.chunking import ChunkedCall
from quick_ledgers import seen
from small_steps import SMALL_STEPS

CHUNK, MICROBATCH = LEVERS["chunk"], LEVERS["microbatch"]


def pixel_loss(trained: bool = False, dropout: float = 0.0, batch: int = 6, dtype: torch.dtype = torch.float32, inside: Any = None) -> Step:
    """A projection that predicts latents, a decoder, and a loss on pixels."""
    torch.manual_seed(0)
    body = [nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout(dropout)]
    decoder = nn.Sequential(*body, nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3))
    net = nn.ModuleDict({"project": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 256))})
    net["decoder"] = decoder.requires_grad_(trained)

    def loss(m: Any, b: dict[str, torch.Tensor]) -> torch.Tensor:
        z = m["project"](b["c"]).view(-1, 4, 8, 8)

        def decode(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(m["decoder"](inside(z) if inside else z), x)

        return 2 * memfit.chunked(decode, z, b["x"], parameters=m["decoder"]) + 1e-3 * z.pow(2).mean()

    pixels = {"c": torch.randn(batch, 16, dtype=dtype), "x": torch.randn(batch, 3, 14, 14, dtype=dtype)}
    return Step(net.to(dtype), loss, torch.optim.AdamW(net.parameters()), pixels)


def ran(step: Step) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(5)
    loss = step.run(step.batch)[""]
    return loss, [p.grad.clone() for m in step.models.values() for p in m.parameters() if p.grad is not None], torch.get_rng_state()


def option(lever: Any, step: Step, size: int) -> Any:
    found = lever.options(seen(step))[0]
    return replace(found, settings={**found.settings, "size": size})


def difference(make: Callable[[], Step], **size_of: int) -> float:
    whole, parts = make(), make()
    loss, expected, state = ran(whole)
    options = [(LEVERS[name], option(LEVERS[name], parts, size)) for name, size in size_of.items()]
    undos = [lever.apply(parts, chosen) for lever, chosen in options]
    got_loss, got, got_state = ran(parts)
    for undo in reversed(undos):
        undo()
    assert torch.equal(state, got_state)
    torch.testing.assert_close(got_loss, loss, rtol=1e-10, atol=0)
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(got, expected, strict=True))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 0.4]))
def test_gradients_are_the_whole_batchs(batch: int, size: int, trained: bool, dropout: float) -> None:
    assert difference(lambda: pixel_loss(trained, dropout, batch, torch.float64), chunk=size) < 1e-10


@pytest.mark.parametrize("size_of", [{"microbatch": 4, "chunk": 2}, {"chunk": 2, "microbatch": 4}, {"chunk": 1, "microbatch": 3}])
def test_together_with_micro_batches(size_of: dict[str, int]) -> None:
    assert difference(lambda: pixel_loss(True, 0.4, 6, torch.float64), **size_of) < 1e-10


@pytest.mark.parametrize("batch", [12, 15])
def test_chunks_of_the_planned_batch_have_each_their_own_masks_of_a_larger_one(batch: int) -> None:
    plain, parts = (pixel_loss(True, 0.4, 6, torch.float64) for _ in range(2))
    larger = pixel_loss(batch=batch, dtype=torch.float64).batch
    with CHUNK.apply(parts, option(CHUNK, parts, 6)):
        whole, got = ran(replace(plain, batch=larger)), ran(replace(parts, batch=larger))
    torch.testing.assert_close(got[1], whole[1], rtol=1e-10, atol=1e-14)
    assert torch.equal(got[2], whole[2])


def test_a_region_that_is_recomputed_inside_a_chunk_meets_its_own_masks() -> None:
    again = lambda z: checkpoint(lambda y: F.dropout(y, 0.5).sin(), z, use_reentrant=False)  # noqa: E731
    assert difference(lambda: pixel_loss(True, 0.3, 5, torch.float64, again), chunk=2) < 1e-10


def test_other_masks_would_be_noticed() -> None:
    make = lambda: pixel_loss(True, 0.4, 6, torch.float64, lambda z: F.dropout(z, 0.3))  # noqa: E731
    whole, parts = make(), make()
    chosen = option(CHUNK, parts, 2)
    with CHUNK.apply(parts, replace(chosen, settings={**chosen.settings, "draws": {}})):
        got = ran(parts)[1]
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(got, ran(whole)[1], strict=True)) > 0.1


@pytest.mark.parametrize(("trained", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.4)])
def test_the_law_holds(trained: bool, dropout: float) -> None:
    ledger = memfit.profile(pixel_loss(trained, dropout), simulate=True)
    for chosen in CHUNK.options(ledger)[::2]:
        step = pixel_loss(trained, dropout)
        with CHUNK.apply(step, chosen):
            captured = memfit.profile(step, simulate=True).peak_bytes
        assert abs(CHUNK.rewrite(ledger, chosen).peak_bytes / captured - 1) < 0.02


def test_the_law_holds_together_with_micro_batches() -> None:
    ledger = memfit.profile(pixel_loss(), simulate=True)
    halves, single = option(MICROBATCH, pixel_loss(), 3), option(CHUNK, pixel_loss(), 1)
    step = pixel_loss()
    with MICROBATCH.apply(step, halves), CHUNK.apply(step, single):
        captured = memfit.profile(step, simulate=True).peak_bytes
    assert abs(CHUNK.rewrite(MICROBATCH.rewrite(ledger, halves), single).peak_bytes / captured - 1) < 0.02


def deep_decoder(trained: bool = False, size: int | None = None) -> Step:
    """Enough layers that what autograd keeps of one sample is most of the peak."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())]
    net = nn.ModuleDict({"project": nn.Linear(8, 16), "decoder": nn.Sequential(*layers).requires_grad_(trained)})

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        z = m["project"](b).permute(0, 3, 1, 2)
        return memfit.chunked(lambda z: m["decoder"](z).pow(2).mean(), z, size=size, parameters=m["decoder"])

    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(3, 16, 16, 8))


def cheap_remade(ledger: memfit.Ledger) -> Any:
    return next(o for o in LEVERS["saved"].options(ledger) if o.name == "cheap results made again")


def same_bits(step: Step, other: Step) -> bool:
    (loss, gradients, _), (expected_loss, expected, _) = ran(step), ran(other)
    return torch.equal(loss, expected_loss) and all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_not_kept_is_not_kept_in_any_chunk(trained: bool) -> None:
    ledger, saved = memfit.profile(deep_decoder(trained), simulate=True), LEVERS["saved"]
    single = option(CHUNK, deep_decoder(trained), 1)
    chunks = CHUNK.rewrite(ledger, single)
    step, alone = deep_decoder(trained), deep_decoder(trained)
    with CHUNK.apply(step, single), saved.apply(step, cheap_remade(chunks)), CHUNK.apply(alone, single):
        captured = memfit.profile(step, simulate=True).peak_bytes
        assert captured < 0.9 * chunks.peak_bytes and same_bits(step, alone)
    assert abs(saved.rewrite(chunks, cheap_remade(chunks)).peak_bytes / captured - 1) < 0.03  # of 400 KB


def test_a_table_that_is_not_told_of_chunks_would_act_on_the_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.levers.saved.apply.chunks_watched_by", lambda active: nullcontext())
    with pytest.raises(AssertionError, match=r"assert \(\d+ < "):
        test_what_is_not_kept_is_not_kept_in_any_chunk(False)


def test_chunks_of_ones_own_size_have_each_their_own_decisions() -> None:
    saved, step = LEVERS["saved"], deep_decoder(size=1)
    ledger = memfit.profile(step, simulate=True)
    with saved.apply(step, cheap_remade(ledger)), warnings.catch_warnings():
        warnings.simplefilter("error")  # a table that does not find its operators says so
        captured = memfit.profile(step, simulate=True).peak_bytes
        assert captured < 0.9 * ledger.peak_bytes and same_bits(step, deep_decoder(size=1))


def test_a_chunk_is_not_divided_once_more_on_paper() -> None:
    found = combining.combinations(memfit.profile(deep_decoder(), simulate=True), LEVERS, "reordered")
    words = [{option.lever for option in combination.options} for combination in found]
    assert {"chunk"} in words and {"microbatch"} in words and not any({"chunk", "microbatch"} <= both for both in words)


def test_what_waits_for_the_disk_is_gone_before_a_chunks_backward() -> None:
    saved, single, step = LEVERS["saved"], option(CHUNK, deep_decoder(), 1), deep_decoder()
    chunks = CHUNK.rewrite(memfit.profile(step, simulate=True), single)
    rows = [row.op for row in chunks.trace.saved if chunks.trace.ops[row.op].name == "aten.native_group_norm.default"]
    disk = table_option(chunks.trace, {op - 1: "disk" for op in rows}, "convolutions' results on disk")
    with CHUNK.apply(step, single), saved.apply(step, disk):
        captured = memfit.profile(step, simulate=True).peak_bytes
    assert abs(saved.rewrite(chunks, disk).peak_bytes / captured - 1) < 0.03


def test_two_calls_in_two_phases() -> None:
    def make() -> Step:
        torch.manual_seed(0)
        nets = {"a": nn.Linear(4, 4).double(), "b": nn.Linear(4, 4).double()}
        frozen = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 4)).double().requires_grad_(False)

        def loss_of(name: str) -> Any:
            def part(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                return (frozen(z) - x).pow(2).mean()

            def loss(m: Any, x: torch.Tensor, carry: dict[str, Any]) -> torch.Tensor:
                return memfit.chunked(part, m[name](x), x) + memfit.chunked(part, m[name](x) * 2, x)

            return loss

        phases = [Phase(name, loss_of(name), torch.optim.SGD(nets[name].parameters(), 0.1)) for name in nets]
        return Step(nets, phases=phases, batch=torch.randn(5, 4, dtype=torch.float64))

    whole, parts = make(), make()
    chosen = option(CHUNK, parts, 2)
    assert [len(calls) for calls in chosen.settings["draws"].values()] == [2, 2]
    torch.manual_seed(1)
    whole.run(whole.batch)
    state = torch.get_rng_state()
    with CHUNK.apply(parts, chosen):
        torch.manual_seed(1)
        parts.run(parts.batch)
    assert torch.equal(state, torch.get_rng_state())
    for name in ("a", "b"):
        torch.testing.assert_close(parts.models[name].weight.grad, whole.models[name].weight.grad, rtol=1e-10, atol=1e-12)


def test_options() -> None:
    found = CHUNK.options(seen(pixel_loss()))
    assert [o.name for o in found] == ["chunks of 6", "chunks of 3", "chunks of 2", "chunks of 1"]
    assert {o.exactness for o in found} == {"reordered"}
    assert CHUNK.options(seen(SMALL_STEPS["frozen_decoder"]())) == []
    assert [o.why.split("; ")[-1] for o in found[:2]] == [
        "now it runs at once",
        "a chunk keeps its part of 3 and is differentiated at once",
    ]
    assert all(re.match(r"memfit\.chunked keeps \d+(\.\d+)? KiB for the backward of 6 samples; ", o.why) for o in found)
    redrawn = CHUNK.options(seen(pixel_loss(inside=lambda z: F.rrelu(z, training=True))))[0]
    assert redrawn.exactness == "redrawn" and "rrelu" in redrawn.why
    assert MARK == ChunkedCall.__name__


def test_the_gradient_of_a_steps_very_first_op_is_the_chunks_too() -> None:
    net = nn.Embedding(6, 4)
    loss = lambda m, x: memfit.chunked(lambda z, y: (z.exp() - y).pow(2).mean(), m.weight, x)  # noqa: E731
    trace = seen(Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(6, 4))).trace
    assert trace is not None
    (region,) = regions(trace)
    backward = {number for number, op in enumerate(trace.ops) if op.phase == "backward" and op.forward is not None}
    assert region.first == 0 and 0 in {trace.ops[number].forward for number in backward} and backward <= set(region.backward)


def test_no_options_where_a_chunk_would_update_a_models_statistics() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.BatchNorm1d(4)})
    loss = lambda m, x: memfit.chunked(lambda z: m["b"](z).pow(2).mean(), m["a"](x), parameters=m["b"])  # noqa: E731
    assert CHUNK.options(seen(Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 4)))) == []


def test_applied_once_and_undone() -> None:
    step = pixel_loss()
    chosen = option(CHUNK, step, 2)
    undo = CHUNK.apply(step, chosen)
    with pytest.raises(CannotApply, match="chunk is already applied"):
        CHUNK.apply(step, chosen)
    undo()
    assert step.running.around_loss == []


def test_a_trained_decoder_it_was_not_told_of_is_refused_when_it_runs() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    loss = lambda m, x: memfit.chunked(lambda z: m["b"](z).mean(), m["a"](x))  # noqa: E731
    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 4))
    with CHUNK.apply(step, option(CHUNK, step, 2)), pytest.raises(memfit.MemfitError, match="would lose a gradient"):
        step.run(step.batch)
