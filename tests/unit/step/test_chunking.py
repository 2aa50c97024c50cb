"""A part of a loss in chunks: the same value and gradients, one chunk's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.step.chunking import Chunking, chunking_by

torch.manual_seed(0)
DECODER = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().requires_grad_(False)


def decode(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (DECODER(z) - x).pow(2).mean()


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss * 3, inputs, allow_unused=True))


def close(ours: Any, theirs: Any) -> bool:
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 10), st.data())
def test_value_and_gradients_for_any_size_and_weight(batch: int, size: int, data: Any) -> None:
    counted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch).filter(any))).double()
    z, x = torch.randn(batch, 3, dtype=torch.float64, requires_grad=True), torch.randn(batch, 4, dtype=torch.float64)

    def loss(z: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ((DECODER(z) - x).pow(2).mean(1) * mask).sum() / mask.sum()

    whole = loss(z, x, counted)
    parts = memfit.chunked(loss, z, x, counted, size=size, weight=lambda z, x, mask: float(mask.sum()))
    assert close([parts], [whole]) and close(gradients(parts, z), gradients(whole, z))


def test_nested_latents_shared_tensors_and_trained_parts() -> None:
    head = nn.Linear(4, 1).double()
    a, b = (torch.randn(5, width, dtype=torch.float64, requires_grad=True) for width in (3, 4))
    nest = {"a": a, "b": [b]}
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def loss(n: dict[str, Any], s: torch.Tensor) -> torch.Tensor:
        return (head(DECODER(n["a"]) * n["b"][0]) * s).pow(2).mean()

    inputs = [a, b, scale, *head.parameters()]
    whole, parts = loss(nest, scale), memfit.chunked(loss, nest, scale, size=2, parameters=head)
    assert close([parts], [whole]) and close(gradients(parts, *inputs), gradients(whole, *inputs))


def test_gradients_flow_on_to_what_made_the_latents_and_may_be_closed_over() -> None:
    encoder, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    shift = encoder.weight.sum()  # not a leaf
    plain = decode(encoder(x), x) * shift
    parts = memfit.chunked(lambda z, y: decode(z, y) * shift, encoder(x), x, size=2, parameters=[shift])
    shift = encoder.weight.sum()
    assert close(gradients(parts, *encoder.parameters()), gradients(plain, *encoder.parameters()))


def test_a_trained_tensor_it_was_not_told_of_is_refused() -> None:
    head, z = nn.Linear(3, 1), torch.randn(4, 3, requires_grad=True)
    with pytest.raises(memfit.MemfitError, match=r"would lose a gradient: .* trained tensor of shape \(1,?.*\).*parameters="):
        memfit.chunked(lambda z: head(z).mean(), z, size=2)
    with torch.no_grad():
        assert memfit.chunked(lambda z: head(z).mean(), z, size=2).shape == ()
    assert memfit.chunked(lambda z: head(z).mean(), z).requires_grad  # whole, autograd does it


def test_what_is_trained_inside_is_refused_also_where_no_argument_needs_a_gradient() -> None:
    """Its gradient would be lost without a word, beside a term of the loss that autograd follows."""
    decoder, z, x = nn.Linear(3, 4), torch.randn(4, 3), torch.randn(4, 4)

    def loss(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (decoder(z) - x).pow(2).mean()

    other = decoder.weight.pow(2).sum()
    with pytest.raises(memfit.MemfitError, match=r"would lose a gradient: .* trained tensor of shape \(4,.*parameters="):
        other + memfit.chunked(loss, z, x, size=2)
    with chunking_by(Chunking(2)), pytest.raises(memfit.MemfitError, match="would lose a gradient"):
        memfit.chunked(loss, z, x)
    with pytest.raises(memfit.MemfitError, match="would lose a gradient"):
        memfit.chunked(lambda z: (z + other).mean(), z, size=2)  # computed outside, from what is trained
    expected = torch.autograd.grad(other + loss(z, x), decoder.weight)
    told = decoder.weight.pow(2).sum() + memfit.chunked(loss, z, x, size=2, parameters=decoder)
    assert torch.allclose(*torch.autograd.grad(told, decoder.weight), *expected)
    with torch.no_grad():
        assert torch.allclose(memfit.chunked(loss, z, x, size=2), loss(z, x))
    assert not memfit.chunked(loss, z, x, size=2, parameters=decoder.requires_grad_(False)).requires_grad


def test_a_tensor_computed_outside_from_what_is_trained_is_to_be_an_argument() -> None:
    head, z = nn.Linear(3, 3).double(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    shift = head(torch.ones(3, dtype=torch.float64)).tanh()
    with pytest.raises(memfit.MemfitError, match=r"second chunk .* computed outside .* pass it as an argument"):
        memfit.chunked(lambda z: head(z + shift).pow(2).mean(), z, size=2, parameters=head)
    shift = head(torch.ones(3, dtype=torch.float64)).tanh()
    whole = head(z + shift).pow(2).mean()
    expected = torch.autograd.grad(whole * 3, [z, *head.parameters()], retain_graph=True)
    parts = memfit.chunked(lambda z, s: head(z + s).pow(2).mean(), z, shift, size=2, parameters=head)
    assert close(gradients(parts, z, *head.parameters()), expected)


def test_an_error_of_the_users_own_in_backward_stays_as_it_is() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        memfit.chunked(lambda z: Broken.apply(z).mean(), torch.randn(4, 3, requires_grad=True), size=2)


def test_without_gradients_it_only_evaluates() -> None:
    z, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert not memfit.chunked(decode, z, x, size=2).requires_grad
    with torch.no_grad():
        assert close([memfit.chunked(decode, z.requires_grad_(), x, size=2)], [decode(z, x)])


def test_mistakes_are_told() -> None:
    z = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(memfit.MemfitError, match=r"needs a scalar from decode_and_loss.* what it gave has shape \(2, 3\)"):
        memfit.chunked(lambda z: z * 2, z, size=2)
    with pytest.raises(memfit.MemfitError, match="a size of at least 1, not 0"):
        memfit.chunked(decode, z, size=0)
    with pytest.raises(memfit.MemfitError, match="got no tensor with samples"):
        memfit.chunked(decode, [], size=1)


def test_one_chunk_is_alive_at_a_time() -> None:
    import weakref

    alive: list[Any] = []

    def loss(z: torch.Tensor) -> torch.Tensor:
        assert not any(made() is not None for made in alive)
        made = torch.tanh(z)
        alive.append(weakref.ref(made.untyped_storage()))
        return made.mean()

    memfit.chunked(loss, torch.randn(4, 3, requires_grad=True), size=1)
    assert len(alive) == 4


def test_the_size_comes_from_around_and_an_explicit_one_wins() -> None:
    lengths: list[int] = []

    def loss(z: torch.Tensor) -> torch.Tensor:
        lengths.append(len(z))
        return z.mean()

    z = torch.randn(5, 3, requires_grad=True)
    memfit.chunked(loss, z)
    with chunking_by(Chunking(2)):
        memfit.chunked(loss, z)
        memfit.chunked(loss, z, size=4)
    assert lengths == [5, 2, 2, 1, 4, 1]


def broken_chunked(kind: str, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    pieces = list(zip(z.split(2), x.split(2), strict=True))
    if kind == "detached":
        pieces[0] = (pieces[0][0].detach(), pieces[0][1])
    if kind == "lost":
        pieces = pieces[:-1]
    losses = [decode(*piece) for piece in pieces]
    weights = [len(piece[0]) if kind != "unweighted" else 5 / 3 for piece in pieces]
    return sum((loss * weight for loss, weight in zip(losses, weights, strict=True)), torch.zeros(())) / 5


@pytest.mark.parametrize(("kind", "right"), [("right", True), ("detached", False), ("lost", False), ("unweighted", False)])
def test_broken_twins_are_noticed(kind: str, right: bool) -> None:
    z, x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    assert close(gradients(broken_chunked(kind, z, x), z), gradients(decode(z, x), z)) is right
