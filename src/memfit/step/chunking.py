"""`memfit.chunked`: a part of a loss, run and differentiated chunk by chunk, so that only one chunk's activations exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from memfit.errors import MemfitError
from memfit.ops.draws import Drawn, NotReplayable
from memfit.ops.leaves import unlisted_leaf
from memfit.ops.replay import Replay
from memfit.ops.turns import Turns
from memfit.step.batches import batch_size, map_tensors, tensors_in
from memfit.step.parts import checked_weight, is_simulated, lengths, shares, sliced
from memfit.step.samples import Places, map_samples, row_tensors, sample_places

ChunkLoss = Callable[..., torch.Tensor]


@dataclass
class Chunking:
    """What the chunk lever says about the calls of `chunked` in a loss; `draws` are each call's, in the order of the calls."""

    size: int
    batch: int = 0
    draws: Sequence[Sequence[Drawn]] = ()
    again: bool = False
    places: dict[int, tuple[int, Places]] = field(default_factory=dict)  # by call: an earlier batch's size, and what belonged to samples
    calls: int = field(default=0, init=False)

    @property
    def by_lever(self) -> bool:
        """Whether the lever chose it: then a plan knows one chunk, which stands for all."""
        return self.batch > 0

    def places_in(self, arguments: tuple[Any, ...], total: int) -> Places:
        """What of the next call's arguments belongs to samples, as the first batch shows it, and better one of the planned size."""
        seen_with = self.places[self.calls][0] if self.calls in self.places else 0
        if not seen_with or total == self.batch != seen_with:
            self.places[self.calls] = total, sample_places(arguments, total)
        return self.places[self.calls][1]

    def turns(self, counts: Sequence[int]) -> Turns:
        """What surrounds the chunks of the next call."""
        draws = self.draws[self.calls] if self.calls < len(self.draws) else ()
        self.calls += 1
        return Turns(Replay(draws, self.batch, counts) if draws else None, self.again)


_chunking: ContextVar[Chunking | None] = ContextVar("memfit.chunking", default=None)


@contextmanager
def chunking_by(chunking: Chunking) -> Iterator[None]:
    """Calls of `chunked` inside take chunks of this size."""
    token = _chunking.set(chunking)
    try:
        yield
    finally:
        _chunking.reset(token)


class ChunkWatcher(Protocol):
    """Told as the chunks of a call run, one after the other."""

    def begins(self, again: bool) -> None:
        """A chunk's loss is computed next; `again`: what runs is the planned chunk once more."""

    def differentiates(self, known: bool) -> AbstractContextManager[None]:
        """Entered around a chunk's backward; `known`: a plan knows it as backward, not as a part of the loss."""


_watchers: ContextVar[tuple[ChunkWatcher, ...]] = ContextVar("memfit.chunk_watchers", default=())


@contextmanager
def chunks_watched_by(watcher: ChunkWatcher) -> Iterator[None]:
    """Chunks that run inside are told to this watcher too."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


class ChunkedCall(nn.Module):
    """Marks the call in a trace."""

    def forward(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run it."""
        return call()


_mark = ChunkedCall()


def chunked(
    decode_and_loss: ChunkLoss,
    latents: Any,
    *others: Any,
    size: int | None = None,
    weight: Callable[..., float] | None = None,
    parameters: Iterable[torch.Tensor | nn.Module] | nn.Module = (),
) -> torch.Tensor:
    """`decode_and_loss(latents, *others)`, a mean over samples, in chunks that are each differentiated before the next one runs.

    Without `size` the batch is taken whole, until the chunk lever chooses. What is trained inside, or needs gradients and is not an
    argument, is given as `parameters`. `weight(latents, *others)` is what a chunk counts for (default: its number of samples).

    >>> decoder = nn.Linear(2, 8).requires_grad_(False)
    >>> latents, images = torch.randn(4, 2, requires_grad=True), torch.randn(4, 8)
    >>> loss = chunked(lambda z, x: (decoder(z) - x).pow(2).mean(), latents, images, size=1)
    >>> loss.backward()
    >>> latents.grad.shape
    torch.Size([4, 2])
    """
    chunking = _chunking.get() if size is None else Chunking(size)
    if size is not None and size < 1:
        raise MemfitError(f"memfit.chunked needs a size of at least 1, not {size}.")
    if _samples_in((latents, *others)) == 0:
        raise MemfitError("memfit.chunked got no tensor with samples in it: give the latents, one row for each sample.")
    if chunking is None:
        return _mark(lambda: decode_and_loss(latents, *others))  # type: ignore[no-any-return]
    run = _Run(decode_and_loss, (latents, *others), weight, chunking, tuple(_tensors_of(parameters)))
    return _mark(run.loss)  # type: ignore[no-any-return]


def _samples_in(arguments: tuple[Any, ...]) -> int:
    return next((samples for samples in map(batch_size, arguments) if samples), 0)


def _tensors_of(parameters: Iterable[torch.Tensor | nn.Module] | nn.Module) -> Iterator[torch.Tensor]:
    for given in [parameters] if isinstance(parameters, nn.Module) else parameters:
        found = given.parameters() if isinstance(given, nn.Module) else [given]
        yield from (tensor for tensor in found if tensor.requires_grad)


@dataclass
class _Run:
    """One call: its arguments cut into chunks, and the gradients that come of them."""

    decode_and_loss: ChunkLoss
    arguments: tuple[Any, ...]
    weight: Callable[..., float] | None
    chunking: Chunking
    parameters: tuple[torch.Tensor, ...]
    followed: bool = field(default_factory=torch.is_grad_enabled, init=False)  # by autograd

    def loss(self) -> torch.Tensor:
        needing = [t for _, t in tensors_in(self.arguments) if t.requires_grad] if self.followed else []
        inputs = list({id(t): t for t in needing}.values())
        parameters = self.parameters if self.followed else ()
        if not inputs and not parameters:
            return self.differentiated([], [])[0]
        return _Differentiated.apply(self, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call, no-any-return]

    def differentiated(self, inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss, and its gradients with respect to the inputs and the parameters."""
        total = _samples_in(self.arguments)
        places = self.chunking.places_in(self.arguments, total)
        counts = lengths(total, self.chunking.size)
        starts = [number * self.chunking.size for number in range(len(counts))]
        pieces = [(start, count) for start, count in zip(starts, counts, strict=True)]
        weighed = shares([self._weight_of(*piece, total, places) for piece in pieces], counts)
        turns, gradients, value = self.chunking.turns(counts), [torch.zeros_like(t) for t in (*inputs, *parameters)], None
        for number, (piece, share) in enumerate(zip(pieces, weighed, strict=True)):
            if share:
                for watcher in _watchers.get():
                    watcher.begins(again=number > 0 and self.chunking.by_lever)
                with _explained(), turns.whole(number):
                    loss = self._chunk(*piece, total, places, share, inputs, parameters, gradients, turns)
                value = loss if value is None else value + loss
        assert value is not None  # shares sum to 1
        return value, gradients

    def _weight_of(self, start: int, count: int, total: int, places: Places) -> float:
        if self.weight is None or is_simulated(self.arguments):
            return float(count)
        return checked_weight("The weight of memfit.chunked", self.weight(*sliced(self.arguments, total, start, count, places)))

    def _chunk(
        self,
        start: int,
        count: int,
        total: int,
        places: Places,
        share: float,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        turns: Turns,
    ) -> torch.Tensor:
        """One chunk's share of the loss; its gradients are added, and nothing else of it remains."""
        rows = {id(t) for t in row_tensors(self.arguments, total, places)}

        def part(t: torch.Tensor) -> torch.Tensor:
            return t.narrow(0, start, count) if id(t) in rows else t

        leaves = {id(t): part(t).detach().requires_grad_(t.requires_grad) for t in inputs}
        listed = map_samples(lambda t: t, lambda entries: entries[start : start + count], self.arguments, total, places)
        arguments = map_tensors(lambda t: leaves[id(t)] if id(t) in leaves else part(t), listed)
        with torch.set_grad_enabled(self.followed), turns.loss():
            loss = self.decode_and_loss(*arguments)
            _check(loss, [*leaves.values(), *parameters])
            loss = loss * share
        if gradients and loss.requires_grad:
            with _graph_of_its_own(), ExitStack() as entered:
                for watcher in _watchers.get():
                    entered.enter_context(watcher.differentiates(self.chunking.by_lever))
                found = torch.autograd.grad(loss, [*leaves.values(), *parameters], allow_unused=True)
            for whole, gradient in zip(gradients, found, strict=True):
                if gradient is not None:
                    (whole if whole.shape == gradient.shape else whole.narrow(0, start, count)).add_(gradient)
        return loss.detach()


class _Differentiated(torch.autograd.Function):
    """A loss whose gradients are known as soon as it is."""

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        value, gradients = run.differentiated(list(tensors[:count]), list(tensors[count:]))
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        return None, None, *(gradient * scale for gradient in ctx.saved_tensors)


def _check(loss: Any, given: list[torch.Tensor]) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"has shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"is a {type(loss).__name__}"
        raise MemfitError(f"memfit.chunked needs a scalar from decode_and_loss, the mean over its chunk; what it gave {shape}.")
    if (stranger := unlisted_leaf(loss, given)) is not None:
        raise MemfitError(
            f"memfit.chunked would lose a gradient: decode_and_loss depends on a trained tensor of shape {tuple(stranger.shape)} "
            "that it was not told of. Give the module or tensor as parameters=, pass it as an argument, or freeze it."
        )


@contextmanager
def _graph_of_its_own() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise MemfitError(
            "memfit.chunked cannot differentiate the second chunk through a tensor that decode_and_loss uses and that was computed outside "
            "it, from what is trained: the first chunk let go of what its gradient needs. Compute it inside, or pass it as an argument."
        ) from error


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NotReplayable as error:
        raise MemfitError(
            f"chunk cannot give each chunk the whole batch's random numbers: {error}. "
            "Allow redrawn (the same distribution, other numbers), or leave out chunk."
        ) from error
