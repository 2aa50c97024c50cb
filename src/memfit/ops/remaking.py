"""Tensors that can be made again: the operator call that made them, and its inputs, kept or made again themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch


def read_as(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """The same memory, read as it is, or as torch reads it after `conj` or `imag`: with a mark on the tensor instead of a copy."""
    if tensor.is_conj() != conjugated:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() != negated else tensor


class Kept:
    """A tensor that is held as it is; one that was changed in place since then is refused."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> torch.Tensor:
        """The tensor, unchanged since it was kept."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, expected version {self.version}."
            )
        return self.tensor


class Part(NamedTuple):
    """A tensor over the memory that output number `output` of a node has."""

    node: Node
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    conjugated: bool = False
    negated: bool = False

    def of(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cut from the node's outputs."""
        part = outputs[self.output]
        if part.shape != self.size or part.stride() != self.stride or part.storage_offset() != self.offset:
            part = part.as_strided(self.size, self.stride, self.offset)
        return read_as(part, self.conjugated, self.negated)


class Node:
    """An operator call that can be run again. After `times` remakings its outputs stay until nobody waits for them; 0: never."""

    __slots__ = ("__weakref__", "args", "func", "kwargs", "outputs", "times", "writes_to_first")

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], times: int) -> None:
        self.func, self.args, self.kwargs, self.times = func, args, kwargs, times
        self.outputs: list[torch.Tensor] | None = None
        self.writes_to_first = False  # an in-place op: its first argument is copied before it is written

    def sources(self) -> Iterator[Node]:
        """The nodes whose outputs it reads, once for every argument."""
        yield from _nodes_in((self.args, *self.kwargs.values()))

    def run(self, made: dict[Node, list[torch.Tensor]], may_overwrite: bool) -> list[torch.Tensor]:
        """Call the operator again on kept inputs and on what its sources made."""
        args = _values(self.args, made)
        if self.writes_to_first and not may_overwrite:
            args = [_copy_of_memory(self.args[0], made), *args[1:]]
        kwargs = {name: _values(value, made) for name, value in self.kwargs.items()}
        out = self.func(*args, **kwargs)
        if self.writes_to_first:
            return [_whole(out, self.args[0], made)]
        return list(out) if isinstance(out, (tuple, list)) else [out]


def _copy_of_memory(part: Part, made: dict[Node, list[torch.Tensor]]) -> torch.Tensor:
    outputs = part.node.outputs or made[part.node]
    return part._replace(output=0).of([outputs[part.output].clone()])


def _whole(written: torch.Tensor, part: Part, made: dict[Node, list[torch.Tensor]]) -> torch.Tensor:
    """All of the memory that an in-place op wrote to a part of, in the form its maker gave it."""
    first = (part.node.outputs or made[part.node])[part.output]
    return read_as(written.as_strided(first.shape, first.stride(), first.storage_offset()), first.is_conj(), first.is_neg())


def remake(wanted: Node) -> list[torch.Tensor]:
    """The outputs of a node. What is made on the way is freed as soon as nobody needs it: nothing here refers to a node once it is done."""
    if wanted.outputs is not None:
        return wanted.outputs
    waiting = _order(wanted)[::-1]
    uses = Counter(source for node in waiting for source in node.sources())
    made: dict[Node, list[torch.Tensor]] = {}
    with torch.no_grad(), _no_autocast():
        while waiting:
            node = waiting.pop()
            made[node] = node.run(made, may_overwrite=_is_only_user(node, uses))
            _release_sources(node, made, uses)
            node.times -= 1
            if not node.times:
                node.outputs, node.args, node.kwargs = made[node], (), {}
    return made[wanted]


def _is_only_user(node: Node, uses: Counter[Node]) -> bool:
    first = next(node.sources(), None)
    return first is not None and first.outputs is None and uses[first] == 1


def _release_sources(node: Node, made: dict[Node, list[torch.Tensor]], uses: Counter[Node]) -> None:
    for source in node.sources():
        uses[source] -= 1
        if not uses[source]:
            del uses[source]
            made.pop(source, None)


def _order(wanted: Node) -> list[Node]:
    """The nodes to run, sources first; without recursion, since chains are as long as networks are deep."""
    order: list[Node] = []
    entered: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(wanted, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in entered and node.outputs is None:
            entered.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in node.sources())
    return order


def _nodes_in(values: Any) -> Iterator[Node]:
    for value in values:
        if type(value) is Part:
            yield value.node
        elif type(value) in (list, tuple):
            yield from _nodes_in(value)


def _values(value: Any, made: dict[Node, list[torch.Tensor]]) -> Any:
    if type(value) is Part:
        return value.of(value.node.outputs or made[value.node])
    if type(value) is Kept:
        return value.get()
    if type(value) in (list, tuple):
        return [_values(item, made) for item in value]
    return value


@contextmanager
def _no_autocast() -> Iterator[None]:
    """The calls were written down with their casts done; an autocast around backward must not cast again."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
