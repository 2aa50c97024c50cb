"""The mechanism: while a loss is computed, decides for each tensor autograd saves what is really kept."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memfit.levers.saved.elsewhere import Elsewhere
from memfit.levers.saved.handles import Handle, put_away
from memfit.levers.saved.line import SMALL_BESIDE, is_for_autograd_only
from memfit.levers.saved.table import BITS, DISK, DROP, HOST, STORED, TIMES, PhaseTable, Region, kind_of, name_of
from memfit.ops.arguments import is_followed, tensors_of
from memfit.ops.draws import draws
from memfit.ops.kernel_parts import parts_now
from memfit.ops.remaking import Kept, Node, Part, remake
from memfit.torch_private import TorchDispatchMode, detached

_NOT_ON_THE_LINE = ("prim", "profiler")  # as in a capture, whose numbers these are
_STATISTICS = {  # batch norms write their running statistics without saying so; made again, they must not
    name: (3, 4) for name in ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
}
_EMPTY_LIKE, _EMPTY = torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default
_ENOUGH = 0.9  # of the planned operators: a simulation leaves out a few that only look at values
_CONVOLUTION = "aten::convolution"


class _Maker(NamedTuple):
    """Which node made a piece of memory."""

    storage: weakref.ref[torch.UntypedStorage]
    node: Node | None  # None: it is to be put away as soon as someone needs it for later
    output: int
    do: str
    dtype: torch.dtype
    version: int
    drawn: bool = False


class Forward(TorchDispatchMode):
    """One computation of one loss. The dispatch mode itself is entered only around the regions of the table."""

    def __init__(self, table: PhaseTable, elsewhere: Elsewhere | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table, self._elsewhere = table, elsewhere
        self._decisions = {(d.region, d.op, d.ordinal): d.do for d in table.decisions}
        self._operators = {name_of(d.op) for d in table.decisions}
        self._names: dict[Any, str] = {}
        self._quiet = self._watching = False
        self._region: Region | None = None
        self._seen: Counter[str] = Counter()
        self._found = 0
        self._makers: dict[int, _Maker] = {}  # an entry goes with its memory, at any time: walk over a copy
        self._readers: dict[int, list[weakref.ref[Node]]] = {}
        self._before_chunk: tuple[Counter[str], dict[int, weakref.ref[torch.UntypedStorage]]] = (Counter(), {})
        self._fresh: list[Handle] = []  # packed since the last op: the inputs of the one that comes next
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet or func.namespace in _NOT_ON_THE_LINE or parts_now():
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._run_in_place(func, args, kwargs)
        do = self._decision(func, args, kwargs)
        if do is None:
            out = func(*args, **kwargs)
        elif do == DROP:
            out = func(*args, **kwargs)
            self._drop_input(func, args)
        else:
            out = self._run_noted(func, args, kwargs, do)
        self._fresh.clear()
        return out

    def enter_region(self, region: Region | None) -> None:
        """From here on, operators are watched, and counted as those of this region, or (None) of the phase."""
        self._region, self._watching = region, True
        self._seen.clear()
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave_region(self) -> None:
        """Operators run unseen again."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._watching = False
        self._fresh.clear()

    def begin_chunk(self, again: bool) -> None:
        """A chunk of a part that is differentiated by itself; `again`: its operators are the ones of the chunk before."""
        if again:
            self._seen = Counter(self._before_chunk[0])
        self._before_chunk = Counter(self._seen), {key: maker.storage for key, maker in self._makers.copy().items()}

    @contextmanager
    def after_chunk(self, unwatched: bool) -> Iterator[None]:
        """While it is differentiated: its own nodes live only as long as its handles do, as after a loss."""
        if self._elsewhere is not None:
            self._elsewhere.settle()
        before = self._before_chunk[1]
        self._makers = {key: maker for key, maker in self._makers.copy().items() if before.get(key) is maker.storage}
        self._readers = {key: nodes for key, nodes in self._readers.items() if any(node() is not None for node in nodes)}
        self._fresh.clear()
        quiet, self._quiet = self._quiet, self._quiet or unwatched
        try:
            yield
        finally:
            self._quiet = quiet

    def _decision(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        if name not in self._operators:
            return None
        kind = kind_of(name, is_followed(args, kwargs))
        do = self._decisions.get((self._region, kind, self._seen[kind]))
        self._seen[kind] += 1
        self._found += do is not None
        return do

    def _run_noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], do: str) -> Any:
        drawn = draws(func, args, kwargs)
        if (drawn or is_for_autograd_only(self._names[func])) and do not in STORED:
            do = BITS  # never drawn again: who knows what stands behind the generator
        node = None if do in STORED else self._node(func, args, kwargs, TIMES.get(do, 0))
        out = func(*args, **kwargs)
        read = {id(t.untyped_storage()) for t in tensors_of((args, *kwargs.values()))}
        if func is _EMPTY_LIKE and node is not None:  # needs a shape, not the tensor that has it
            node = Node(_EMPTY, [out.shape, out.stride()], {"dtype": out.dtype, "device": out.device}, node.times)
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        largest = max((t.untyped_storage().nbytes() for t in tensors_of(outputs)), default=0)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and _worth_noting(tensor, largest) and id(tensor.untyped_storage()) not in read:
                self._note(tensor, node, index, do, drawn)
        return out

    def _node(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], times: int) -> Node:
        kept = [self._keep(arg) for arg in args]
        for place in _statistics_written_by(func, args):
            kept[place] = None
        node = Node(func, kept, {name: self._keep(value) for name, value in kwargs.items()}, times)
        reference = weakref.ref(node)
        for value in _kept_in((kept, *node.kwargs.values())):
            self._readers.setdefault(id(value.tensor.untyped_storage()), []).append(reference)
        return node

    def _note(self, tensor: torch.Tensor, node: Node | None, index: int, do: str, drawn: bool, writes: int = 0) -> None:
        """From now on this memory can be made again; torch counts a write only after the operator has returned to autograd."""
        storage = tensor.untyped_storage()
        key = id(storage)

        def gone(reference: weakref.ref[torch.UntypedStorage]) -> None:  # what nobody saved by then, nobody will ask for
            if key in self._makers and self._makers[key].storage is reference:
                del self._makers[key]

        self._makers[key] = _Maker(weakref.ref(storage, gone), node, index, do, tensor.dtype, tensor._version + writes, drawn)

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            part = self._part(value)
            return _kept(value) if part is None else part
        return [self._keep(item) for item in value] if type(value) in (list, tuple) else value

    def _part(self, tensor: torch.Tensor) -> Part | None:
        """How this tensor can be made again, if an op whose result is not kept made its memory."""
        storage = tensor.untyped_storage()
        found = self._makers.get(id(storage))
        if found is None or found.storage() is not storage or tensor.dtype != found.dtype or tensor._version != found.version:
            return None  # written to since, perhaps where nobody watched
        node, output = found.node, found.output
        if node is None:
            node, output = self._quietly(put_away, tensor, found.do, found.drawn, self._elsewhere), 0
            self._makers[id(storage)] = found._replace(node=node, output=0)
        if node is None:
            return None
        return Part(node, output, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())

    def _run_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nodes that hold what is about to be written are made now; memory that can be made again stays so if the op is simple."""
        written = _written(func, args, kwargs)
        for tensor in written:
            self._wait_for_copies(tensor)
            self.make_readers(tensor)
        simple = len(written) == 1 and written[0] is args[0]
        maker = self._makers.get(id(args[0].untyped_storage())) if simple else None
        if maker is not None and draws(func, args, kwargs):
            maker = maker._replace(do=BITS, drawn=True)
        part = self._part(args[0]) if maker is not None and maker.do not in STORED else None
        node = None
        if part is not None:
            node = self._node(func, args, kwargs, part.node.times)
            node.writes_to_first, part.node.times = True, 0  # what was there before the write is only a step on the way
        for tensor in written:
            self._makers.pop(id(tensor.untyped_storage()), None)
        out = func(*args, **kwargs)
        if maker is not None and (node is not None or maker.do in STORED):
            self._note(args[0], node, 0, maker.do, maker.drawn, writes=1)
        self._fresh.clear()
        return out

    def make_readers(self, tensor: torch.Tensor) -> None:
        """Its memory is about to be written: nodes that hold it run now, and what they make stays."""
        storage = tensor.untyped_storage()
        for reference in self._readers.pop(id(storage), ()):
            node = reference()
            if node is None or node.outputs is not None:
                continue
            if any(kept.tensor.untyped_storage() is storage for kept in _kept_in((node.args, *node.kwargs.values()))):
                node.times = 1
                self._quietly(remake, node)

    def _wait_for_copies(self, tensor: torch.Tensor) -> None:
        """Memory on its way to disk or to the host must not be written to before it is there."""
        maker = self._makers.get(id(tensor.untyped_storage()))
        if maker is not None and maker.node is not None and maker.do in (DISK, HOST) and self._elsewhere is not None:
            self._elsewhere.settle()

    def _drop_input(self, func: Any, args: tuple[Any, ...]) -> None:
        """A convolution whose weights get no gradient saves an input that nobody will read."""
        if func._schema.name != _CONVOLUTION or any(t.requires_grad for t in tensors_of(args[1:3])):
            return
        *_, given, weight = (None, None, *self._fresh)  # what it saved itself came last: the op before it may have saved the same tensor
        if given and weight and given.is_of(args[0], self._part(args[0])) and weight.is_of(args[1], self._part(args[1])):
            given.drop(args[0])

    def _quietly(self, call: Any, *values: Any) -> Any:
        before, self._quiet = self._quiet, True
        try:
            return call(*values)
        finally:
            self._quiet = before

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """Called by autograd for each tensor it saves."""
        part = self._part(tensor) if self._makers else None
        if not self._watching:  # most tensors of a step: as little Python as can be
            return Kept(tensor if tensor.is_leaf else detached(tensor)) if part is None else Handle(part)
        handle = Handle(self._quietly(_kept, tensor) if part is None else part)
        self._fresh.append(handle)
        return handle

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        """Called by autograd when backward needs the tensor."""
        if type(handle) is Kept:
            return handle.get()
        before, self._quiet = self._quiet, True
        try:
            return handle.get()
        finally:
            self._quiet = before

    def tell_what_is_missing(self) -> None:
        """The loss is computed, all of it: say so if little of what the table names was seen."""
        if self._found < _ENOUGH * len(self._decisions):
            warnings.warn(
                f"memfit: this step differs from the one that was planned: only {self._found} of the {len(self._decisions)} operators "
                "whose results were not to be kept ran in it. It is computed correctly, but may need more memory: plan it again.",
                stacklevel=2,
            )

    def forget(self) -> None:
        """The loss is computed, or failed: handles know all they need, nothing is looked up any more but who reads a parameter."""
        if self._elsewhere is not None:
            self._elsewhere.settle()
        self._makers.clear()
        self._fresh.clear()


def _kept(tensor: torch.Tensor) -> Kept:
    """An output of the very node that saves it would keep itself alive: so without its place in the graph."""
    return Kept(tensor if tensor.is_leaf or not tensor.requires_grad else detached(tensor))


def _worth_noting(tensor: torch.Tensor, largest: int) -> bool:
    """Its memory is all its own, holds what it says, and is not small beside the op's other outputs, as the means of a norm are."""
    memory = tensor.untyped_storage().nbytes()
    if tensor.is_conj() or tensor.is_neg():
        return False
    return memory == tensor.numel() * tensor.element_size() and memory * SMALL_BESIDE >= largest


def _statistics_written_by(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The places of the arguments that a batch norm writes to, if it is training."""
    return _STATISTICS.get(func._schema.name, ()) if args[5:6] and args[5] is True else ()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an operator writes to, as its schema says."""
    values = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments)]
    return [t for a, value in values if a.alias_info is not None and a.alias_info.is_write for t in tensors_of((value,))]


def _kept_in(values: Any) -> Iterator[Kept]:
    for value in values:
        if type(value) is Kept:
            yield value
        elif type(value) in (list, tuple):
            yield from _kept_in(value)
