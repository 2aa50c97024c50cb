"""Random numbers written down in one run and handed out again in another, whose own draws would differ: float64's do."""

from __future__ import annotations

from typing import Any

import torch

from memfit.proof.shelf import Key, Shelf
from memfit.step.batches import map_tensors
from memfit.torch_private import TorchDispatchMode

# What these give does not depend on the last bits of their inputs, so that one run's draws serve the other.
_FILLS = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_FACTORIES = ("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm")
_SAMPLES = ("bernoulli", "multinomial", "normal", "poisson", "_sample_dirichlet", "_standard_gamma")
_DRAWS = frozenset((*_FILLS, *_FACTORIES, *_SAMPLES))
_MASKS = frozenset({"native_dropout"})  # gives its input times a mask, and the mask


class CannotReplay(Exception):
    """A run that draws otherwise than the recorded one, or in a way that no record can serve."""


class DrawsRecorded(TorchDispatchMode):
    """Writes down every draw of the run inside."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shelf, self._count = shelf, 0
        self.unreplayable = ""  # an op that draws inside a larger computation

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the op; keep what it drew."""
        kind = _kind_of(func)
        if not kind:
            return func(*args, **(kwargs or {}))
        before = _generators() if kind == "unknown" else None
        result = func(*args, **(kwargs or {}))
        if before is None:
            drawn = result[1] if kind == "mask" else result
            self.shelf.put(_key(self._count, func), drawn)
            self._count += 1
        elif before != _generators():
            self.unreplayable = str(func)
        return result


class DrawsReplayed(TorchDispatchMode):
    """Hands out the draws that were written down, in their order."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shelf, self._count = shelf, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Let everything run but draws."""
        kind = _kind_of(func)
        result = func(*args, **(kwargs or {}))  # also for a draw: its shape, type and device are wanted
        if kind not in ("draw", "mask"):
            return result
        drawn = self._next(func, result[1] if kind == "mask" else result)
        if kind == "draw":
            return result.copy_(drawn)
        mask = result[1].copy_(drawn)
        return args[0] * mask / (1 - args[1] or 1.0), mask

    def _next(self, func: Any, result: torch.Tensor) -> torch.Tensor:
        key = _key(self._count, func)
        self._count += 1
        if key not in self._shelf or (drawn := self._shelf.get(key)).shape != result.shape:
            raise CannotReplay(f"its {func} draws otherwise than before")
        return drawn


class InFloat64(TorchDispatchMode):
    """Whatever asks for fewer bits gets float64: constants of the loss, casts, factories. Views and targets stay as they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Widen the arguments, then run the op."""
        named = func._schema.arguments
        wide = [a if _is_target(named[at]) else map_tensors(_widened, a) for at, a in enumerate(args)]
        by_name = {argument.name: argument for argument in named}
        words = {
            k: _WIDER.get(v, v) if isinstance(v, torch.dtype) else v if _is_target(by_name[k]) else map_tensors(_widened, v)
            for k, v in (kwargs or {}).items()
        }
        return func(*wide, **words)


_WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor


def _is_target(argument: Any) -> bool:
    return argument.alias_info is not None


def _kind_of(func: Any) -> str:
    name = func._schema.name.removeprefix("aten::")
    if name in _DRAWS:
        return "draw"
    if name in _MASKS:
        return "mask"
    return "unknown" if torch.Tag.nondeterministic_seeded in func.tags else ""


def _key(number: int, func: Any) -> Key:
    return Key("draws", f"{number} {func._schema.name}")


def _generators() -> list[bytes]:
    """Attention is said to draw, and does only with dropout: the generators tell."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [state.numpy().tobytes() for state in states]
