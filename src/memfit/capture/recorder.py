"""The one recorder: a dispatch mode that writes down every storage's birth and death, real or fake."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.capture.autograd_nodes import current_node_number, node_number_of_next_op
from memfit.capture.gradient_sums import is_summed_in_place, lone_gradient
from memfit.capture.whereabouts import ModulePath, SourceLines
from memfit.errors import MemfitError
from memfit.ops.arguments import is_followed, tensors_of
from memfit.ops.draws import draws
from memfit.ops.kernel_parts import parts_now
from memfit.records import Call, Op, Saved, Storage
from memfit.torch_private import TorchDispatchMode

OpCall = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], None]


BEFORE = _NO_NODE = -1
_SUMMED_IN_PLACE = torch.ops.aten.add_.Tensor
_NOT_ON_THE_LINE = ("prim", "profiler")  # questions about a tensor and marks of torch's own: they take no memory
_TAKES_NEW_TENSORS = (torch.ops.aten.lift_fresh.default,)  # torch.tensor(...) makes its tensor out of our sight


class _Watched(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its number."""

    __slots__ = ("number",)
    number: int


class Recorder(TorchDispatchMode):
    """While it is entered, every operator call becomes an Op, every storage a Storage.

    `watch` names what exists before the step. `enter` is called by Step.run as the step moves from phase to phase.
    `on_op` sees each call before it runs: for what only one kind of capture needs.
    """

    def __init__(self, modules: ModulePath, on_op: OpCall | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = -1  # the op that is running, or ran last
        self._modules, self._lines, self._on_op = modules, SourceLines(), on_op
        self._seconds: float | None = None  # of the last call
        lone_gradient()  # before anything is recorded
        modules.on_enter, modules.on_leave, modules.on_adopt = self._enter_module, self._leave_module, self._adopt_module
        self.phase, self._loss = "forward", ""
        self._ops: list[list[Any]] = []
        self._watched: dict[int, _Watched] = {}
        self._storages: list[list[Any]] = []
        self._op_of_node: dict[int, int] = {}
        self._nodes: list[int] = []  # that ran, for each op
        self._saved: list[list[Any]] = []
        self._open_calls: list[tuple[str, int]] = []
        self._calls: list[Call] = []
        self.gradients_in_parts = False
        self._with_gradient: set[tuple[str, int]] = set()  # by loss
        self._silent = self._over = False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Recorder:
        self._modules.__enter__()
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*exc)
        self._modules.__exit__(*exc)
        self._over = True

    def enter(self, phase: str, loss: str) -> None:
        """The step moves on to another phase."""
        self.phase, self._loss = phase, loss

    def saw_loss(self, name: str, loss: torch.Tensor) -> None:
        """The loss itself is of no interest here."""

    def watch(self, tensor: torch.Tensor, kind: str, name: str = "") -> None:
        """Say what a storage is to the step; one not seen so far was there before. The first word on a storage counts."""
        number = self._number_of(tensor)
        if not self._storages[number][3]:
            self._storages[number][3], self._storages[number][6] = kind, name

    def gradient_came(self, parameter: torch.Tensor) -> None:
        """Autograd has given a parameter its gradient; if that happens again for the same loss, each was only a part."""
        if self.phase == "backward":
            self.gradients_in_parts |= (self._loss, id(parameter)) in self._with_gradient
            self._with_gradient.add((self._loss, id(parameter)))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent or func.namespace in _NOT_ON_THE_LINE:
            return self._asked(func, args, kwargs)
        if self._is_gradient_sum(func, args):
            func = _SUMMED_IN_PLACE
        self.now = now = self.now + 1
        op = self._begin(func, args, kwargs)
        self._ops.append(op)
        if self._on_op:
            self._on_op(now, func, args, kwargs)
        out = self._call(func, args, kwargs)
        op[7] = self._seconds
        op[6] = [self._number_of(t, now) for t in tensors_of((out,))]
        return out

    def _is_gradient_sum(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd adds here to a gradient that another node gave before."""
        if self.phase != "backward" or not is_summed_in_place(func, args):
            return False
        born: int = self._storages[self._number_of(args[0])][1]
        return born < 0 or self._nodes[born] != current_node_number()

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = time.perf_counter()
        out = func(*args, **kwargs)
        self._seconds = time.perf_counter() - start
        return out

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        forward, module, source = None, "", ""
        self._nodes.append(current_node_number() if self.phase == "backward" else _NO_NODE)
        if self.phase == "forward":
            module, source = self._modules.current, self._lines.here()
            self._op_of_node.setdefault(node_number_of_next_op(), self.now)
        elif self.phase == "backward":
            forward = self._op_of_node.get(self._nodes[-1])
            if forward is not None:
                module, source = self._ops[forward][3], self._ops[forward][4]
        born = self.now if func in _TAKES_NEW_TENSORS else BEFORE
        inputs = [self._number_of(t, born) for t in tensors_of(args)]
        drew = draws(func, args, kwargs)
        followed = is_followed(args, kwargs)
        return [func, self.phase, self._loss, module, source, inputs, (), None, forward, parts_now(), drew, followed]

    def _number_of(self, tensor: torch.Tensor, born: int = BEFORE) -> int:
        if tensor.layout != torch.strided:
            raise MemfitError(
                f"This step uses a sparse tensor ({tensor.layout}, shape {tuple(tensor.shape)}), whose memory memfit does not follow yet: "
                "use a dense one, as in nn.Embedding(…, sparse=False)."
            )
        storage = tensor.untyped_storage()
        known = self._watched.get(id(storage))
        if known is not None and known() is storage:
            return known.number
        watched = _Watched(storage, self._died)
        watched.number = len(self._storages)
        self._watched[id(storage)] = watched
        self._storages.append([storage.nbytes(), born, None, "", tuple(tensor.shape), tensor.dtype, "", _odd_strides(tensor)])
        return watched.number

    def _died(self, watched: _Watched) -> None:
        if not self._over:
            self._storages[watched.number][2] = self.now

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        node = node_number_of_next_op()
        self._saved.append([self._number_of(tensor), node, None])
        made_by = tensor.grad_fn
        if made_by is not None and made_by._sequence_nr() == node:  # an output of the node itself: keeping it would be a cycle
            self._silent = True
            tensor = tensor.detach()
            self._silent = False
        return tensor, len(self._saved) - 1

    def _unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        self._saved[packed[1]][2] = self.now + 1
        return packed[0]

    def _enter_module(self, path: str) -> None:
        self._open_calls.append((path, self.now + 1))

    def _adopt_module(self, path: str, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters(path):
            self.watch(parameter, "parameters", name)

    def _leave_module(self, path: str) -> None:
        path, first = self._open_calls.pop()
        if first <= self.now and self.phase == "forward":
            self._calls.append(Call(path, first, self.now))

    def ops(self, workspaces: Sequence[int], errors: Sequence[int] | None = None) -> tuple[Op, ...]:
        """What ran, with the bytes each op took inside and how far those may be off."""
        return tuple(
            Op(str(func), phase, loss, module, source, tuple(read), tuple(made), inside, error, seconds, forward, None, None, *traits)
            for (func, phase, loss, module, source, read, made, seconds, forward, *traits), inside, error in zip(
                self._ops, workspaces, errors or [0] * len(self._ops), strict=True
            )
        )

    def made_by_ops(self) -> list[int]:
        """Bytes of new storages, for each op."""
        made = [0] * len(self._ops)
        for size, born, *_ in self._storages:
            if born >= 0:
                made[born] += size
        return made

    def storages(self, hidden: Sequence[int] = ()) -> tuple[Storage, ...]:
        """What lived, and when; `hidden` bytes of an op are added to the first storage it made."""
        unseen = dict(enumerate(hidden))
        return tuple(
            Storage(size + unseen.pop(born, 0), born, died, kind, shape, str(dtype).removeprefix("torch."), name, strides)
            for size, born, died, kind, shape, dtype, name, strides in self._storages
        )

    def saved(self) -> tuple[Saved, ...]:
        """What autograd kept, for which op."""
        return tuple(Saved(number, self._op_of_node[node], read) for number, node, read in self._saved if node in self._op_of_node)

    def left_over(self) -> int:
        """Bytes made in this step that live now and are nothing a step keeps: no gradient, no optimizer state, no cycle to be found."""
        if self._left():
            gc.collect()
        return self._left()

    def _left(self) -> int:
        alive = [self._storages[watched.number] for watched in self._watched.values() if watched() is not None]
        return sum(storage[0] for storage in alive if storage[1] >= 0 and storage[3] in ("", "other"))

    def calls(self) -> tuple[Call, ...]:
        """The module calls of the forward passes."""
        return tuple(self._calls)


def _odd_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_contiguous() else tuple(tensor.stride())
