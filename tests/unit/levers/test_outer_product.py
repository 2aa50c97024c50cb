"""outer_product: found, rewritten through adapters, the same training, and nothing of its size left."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch import nn

import memfit
from conditioned import Block, Conditioned, conditioned, describe, factored_block, factored_model
from memfit import Step
from memfit.levers import CannotApply, outer_product
from memfit.levers.outer_product import OuterProduct, factored
from memfit.ops import documented_outer_products as documented
from memfit.ops.outer_product import factored_attention, materialised_attention
from memfit.records import Option
from small_steps import dense

LEVER = OuterProduct()
FACTORED = Option("outer_product", "factored", "reordered", {"where": "net.py:12"})


@pytest.fixture(autouse=True)
def _described() -> Iterator[None]:
    before = dict(outer_product._ADAPTERS)
    describe()
    yield
    outer_product._ADAPTERS.clear()
    outer_product._ADAPTERS.update(before)


@pytest.mark.parametrize("sizes", [{}, {"tokens": 128, "channels": 64, "blocks": 3}, {"width": 512, "batch": 8}], ids=str)
def test_the_rewrite_is_what_a_fresh_capture_sees(sizes: dict[str, int]) -> None:
    step = conditioned(**sizes)
    before = memfit.profile(step, simulate=True)
    (option,) = LEVER.options(before)
    told = LEVER.rewrite(before, option)
    with LEVER.apply(step, option):
        seen = memfit.profile(step, simulate=True)
    assert seen.peak_bytes < before.peak_bytes / 2
    assert told.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.02)
    assert not [f for f in seen.findings if f.kind == "outer_product"]


class FusedBlock(Block):
    """The same block, with torch's fused attention in place of a map."""

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        batch, channels, _ = x.shape
        q, k, v = (t.reshape(batch, 2, channels // 2, -1).mT.contiguous() for t in self.qkv(self.norm(x)).chunk(3, 1))
        more_k, more_v = self.encoder_kv(context).reshape(batch, 2, channels, -1).mT.chunk(2, -1)
        k, v = torch.cat([more_k, k], -2).contiguous(), torch.cat([more_v, v], -2).contiguous()
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.mT.reshape_as(x))


def test_the_rewrite_also_knows_fused_attention() -> None:
    step = conditioned(width=512, channels=64, batch=8, blocks=3)
    for block in step.models[""].blocks:  # type: ignore[union-attr]
        block.__class__ = FusedBlock
    before = memfit.profile(step, simulate=True)
    (option,) = LEVER.options(before)
    told = LEVER.rewrite(before, option)
    with LEVER.apply(step, option):
        seen = memfit.profile(step, simulate=True)
    assert seen.peak_bytes < before.peak_bytes / 2
    assert told.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.02)


def kept_by(attention: object, contexts: int) -> int:
    """Bytes that one attention over 4×32×64 leaves for backward, its result with it."""
    q, k, v = nn.Conv1d(8, 96, 1)(torch.randn(4, 8, 64)).chunk(3, 1)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = attention(q, k, v)  # type: ignore[operator]
        nn.Conv1d(32, 32, 1)(out)
    return sum(kept.values()) - contexts


def test_it_keeps_hardly_more_than_fused_attention_without_any_context() -> None:
    c, weight, bias = torch.randn(4, 128), torch.randn(64, 128), torch.randn(64)

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.reshape(4, 2, 16, 64).mT.contiguous() for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).mT.reshape(4, 32, 64)

    result, factor = 4 * 4 * 32 * 64, 4 * (c.numel() + weight.numel() + bias.numel())
    without = kept_by(fused, 0)
    assert kept_by(lambda q, k, v: factored_attention(q, k, v, c, weight, bias, 2), factor) < without + result
    assert kept_by(lambda q, k, v: materialised_attention(q, k, v, c, weight, bias, 2), factor) > without + 10 * result


def test_only_outer_products_are_offered_for() -> None:
    assert LEVER.options(memfit.profile(dense(), simulate=True)) == []


def largest_in(attention: object, batch: int, width: int, tokens: int) -> int:
    """Elements of the largest tensor that exists in one attention and its backward."""
    net = nn.ModuleList([nn.Conv1d(8, 24, 1), nn.Linear(width, width), nn.Conv1d(width, 16, 1)])

    def loss(m: nn.ModuleList, b: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = m[0](b["x"]).chunk(3, 1)
        return attention(q, k, v, m[1](b["c"]), m[2].weight, m[2].bias, 2).square().mean()  # type: ignore[operator,no-any-return]

    batches = {"x": torch.randn(batch, 8, tokens), "c": torch.randn(batch, width)}
    trace = memfit.profile(Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), batches), simulate=True).trace
    assert trace is not None
    made = [(prod(s.shape), trace.ops[s.born]) for s in trace.storages if s.born >= 0 and s.kind == ""]
    return max(size for size, op in made if op.phase != "optimizer")


def test_nothing_of_the_product_s_size_exists() -> None:
    batch, width, tokens, heads = 4, 320, 96, 2
    limit = max(256 * width, batch * heads * tokens * tokens)  # a chunk of queries of one sample, and the tokens' own map
    assert largest_in(factored_attention, batch, width, tokens) <= limit < min(batch * width * width, batch * heads * tokens * width)
    assert largest_in(materialised_attention, batch, width, tokens) >= batch * width * width  # the check can fail


def test_it_is_the_same_training() -> None:
    step = conditioned()
    twin = copy.deepcopy(step.models[""])
    with LEVER.apply(step, FACTORED):
        step.run(step.batch)
    loss = (twin(step.batch["x"], step.batch["y"]) - step.batch["x"]).pow(2).mean()
    loss.backward()
    for ours, theirs in zip(step.models[""].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_wrong_adapter_is_caught() -> None:
    step = conditioned()
    twin = copy.deepcopy(step)
    factored(Block, lambda block: lambda x, c: factored_block(block)(x, 2 * c))
    with LEVER.apply(step, FACTORED):
        step.run(step.batch)
    twin.run(twin.batch)
    pairs = zip(step.models[""].parameters(), twin.models[""].parameters(), strict=True)
    assert not all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6) for a, b in pairs)  # type: ignore[arg-type]


def test_undo_restores_the_same_objects() -> None:
    step = conditioned()
    block, before = step.models[""].blocks[0], list(step.models[""].state_dict())  # type: ignore[index,union-attr]
    forwards = [dict(vars(m)) for m in step.models[""].modules()]
    undo = LEVER.apply(step, FACTORED)
    assert "forward" in vars(block)
    undo()
    assert [dict(vars(m)) for m in step.models[""].modules()] == forwards and list(step.models[""].state_dict()) == before
    block.forward = kept = factored_block(block)  # someone's own forward comes back too
    with LEVER.apply(step, FACTORED):
        assert vars(block)["forward"] is not kept
    assert vars(block)["forward"] is kept


def test_derived_classes_use_the_nearest_description() -> None:
    class Derived(Conditioned):
        pass

    net = Derived()
    step = Step(net, lambda m, b: m(*b).mean(), torch.optim.SGD(net.parameters(), 0.1), (torch.randn(2, 3, 8), torch.tensor([1, 2])))
    with LEVER.apply(step, FACTORED):
        assert vars(net)["forward"].__qualname__ == factored_model(net).__qualname__


def test_a_model_nobody_described_is_refused() -> None:
    with pytest.raises(CannotApply, match=r"no factored form.*net\.py:12.*Describe its classes with memfit\.levers"):
        LEVER.apply(dense(), FACTORED)


def test_it_works_under_autocast() -> None:
    step = conditioned()
    with LEVER.apply(step, FACTORED), torch.autocast("cpu", torch.bfloat16):
        half = step.models[""](step.batch["x"], step.batch["y"])
    full = step.models[""](step.batch["x"], step.batch["y"])
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.1)


def test_the_documented_methods_are_what_they_are() -> None:
    c = torch.randn(6, 16)
    full = torch.einsum("ab,ac->abc", c, c)
    assert torch.equal(documented.chunked(c, 4), full) and documented.EXACTNESS["chunked"] == "bitwise"
    dropped = c * torch.tensor([1.0, 0, 1, 1, 0, 1])[:, None]
    assert torch.equal(documented.conditional(dropped), torch.einsum("ab,ac->abc", dropped, dropped))  # type: ignore[arg-type]
    assert documented.conditional(torch.zeros_like(c)) is None  # not the same as zeros: their columns are the bias
    cut = documented.low_rank(c, 0.125)
    assert cut.shape == full.shape and not torch.allclose(cut, full, rtol=1e-2)
    dropped = torch.cat([c[:1], torch.zeros(31, 16)]).requires_grad_()
    documented.low_rank(dropped).sum().backward()
    assert dropped.grad is not None and not torch.isfinite(dropped.grad).all()  # conditions that are dropped give NaN gradients
