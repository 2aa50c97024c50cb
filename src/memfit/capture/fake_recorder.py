"""The recorder on fake tensors: it sets right what torch's fake kernels say differently from the CPU's real ones."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from memfit.capture.recorder import BEFORE, Recorder
from memfit.errors import StepError
from memfit.torch_private import FakeTensor, FakeTensorMode, without_modes

aten = torch.ops.aten


class FakeRecorder(Recorder):
    """Calls take no time worth noting. Two kinds of numbers are read from tensors that have no values:

    A number that an optimizer reads is 1, since it scales an update and shapes nothing. A lone random draw is its mean: models that skip
    a layer now and then compare one with a rate, and the step that skips none is the one that counts.
    """

    def __enter__(self) -> FakeRecorder:
        self._mode: FakeTensorMode = torch.empty(0).fake_mode  # type: ignore[attr-defined]  # of the simulation around us
        super().__enter__()
        return self

    def _number_of(self, tensor: torch.Tensor, born: int = BEFORE) -> int:
        """A real one, which a loss holds by itself, is what stands in for it: what an operator gives as a view of it is a view of that."""
        if not isinstance(tensor, FakeTensor):
            was, self._silent = self._silent, True
            tensor, self._silent = self._mode.from_tensor(tensor), was
        return super()._number_of(tensor, born)

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch asks each tensor for its device several times an op: the long way to the answer is a tenth of a simulation."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        return func(*args, **kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.rand.default and math.prod(args[0]) == 1:
            return torch.tensor(0.5).reshape(args[0])
        if _writes_to_lists(func) and args[0] and args[0][0].dim():
            return None  # makes nothing, and would look at hundreds of tensors; lone numbers are an optimizer's count of steps
        if func is aten._local_scalar_dense.default and self.phase == "optimizer" and _has_no_value(args[0]):
            return 1.0
        if func in _OF_ONE_DTYPE and (refusal := _kernels_refusal(func, args, kwargs)):
            source = self._ops[-1][4] or "the step"
            raise StepError([f"{source} raises RuntimeError: {refusal}; cast one of them, as in batch.to(torch.float32) or model.float()"])
        if func is _GROUPED:
            return _grouped_product(*args, **kwargs)
        out = func(*args, **kwargs)
        return _of_real_dtypes(func, args, out) if func in _MIXED_NORMS else out


def _has_no_value(number: torch.Tensor) -> bool:
    return isinstance(number, FakeTensor) and number.constant is None


@cache
def _writes_to_lists(func: Any) -> bool:
    name = str(func.name()).split(".")[0]
    return name.startswith("aten::_foreach_") and name.endswith("_")


_MIXED_NORMS = {
    aten.native_group_norm.default: (0, 1, 1),
    aten.native_group_norm_backward.default: (1, 4, 4),
    aten.native_layer_norm.default: (0, 2, 2),
    aten.native_layer_norm_backward.default: (1, 5, 6),
    aten.native_batch_norm.default: (0, 1, 1),
    aten.native_batch_norm_backward.default: (1, 2, 2),
}
"""Where a real kernel takes the dtype of each output from, by argument; a fake one promotes them to a common dtype."""


_OF_ONE_DTYPE = {aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default, aten.bmm.default, aten.baddbmm.default}
"""Products whose real kernels refuse factors of different dtypes; not every fake one does."""


def _kernels_refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What the real kernel says to floats of these dtypes, asked with a single number each; "" where it takes them."""
    factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if len({factor.dtype for factor in factors}) == 1 or not all(factor.is_floating_point() for factor in factors):
        return ""
    real = without_modes()
    if real is None:
        return ""
    with real:
        single = [torch.zeros((1,) * arg.dim(), dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
        try:
            func(*single, **kwargs)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


_GROUPED = getattr(getattr(aten, "_grouped_mm", None), "default", object())  # newer than the oldest torch we work with


def _grouped_product(first: Any, second: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Products of groups of rows (2D by 3D), of columns (3D by 2D), of what is summed (2D by 2D), or of a batch (3D by 3D).

    torch's fake kernel takes bfloat16 alone, the CPU's own any dtype.
    """
    by_rows, by_columns = first.dim() == 2, second.dim() == 2
    groups = () if by_rows != by_columns else (offs.numel() if by_rows else first.shape[0],)
    return first.new_empty((*groups, first.shape[-2], second.shape[-1]), dtype=out_dtype or first.dtype)


def _of_real_dtypes(func: Any, args: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    sources = [args[position] for position in _MIXED_NORMS[func]]
    return tuple(
        out if out is None or like is None or out.dtype == like.dtype else torch.empty_like(out, dtype=like.dtype)
        for out, like in zip(outputs, sources, strict=True)
    )
