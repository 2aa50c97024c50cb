"""The optimizer's step, taken parameter by parameter while backward runs, so that each gradient can go at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.errors import MemfitError
from memfit.step.running import interrupts_held_back


@contextmanager
def stepped_in_backward(
    optimizers: Sequence[Optimizer], enter: Callable[[str], None], before_update: Sequence[Callable[[torch.Tensor], object]] = ()
) -> Iterator[None]:
    """While it is entered, a parameter is updated and its gradient freed as soon as backward has all of it.

    The hooks live only as long as one backward, on the parameters the optimizers hold then: fake stand-ins get them as well.
    Ctrl-C waits for the end, since from the first update on there is no way back.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> with stepped_in_backward([torch.optim.SGD([w], lr=0.5)], enter=lambda phase: None):
    ...     w.sum().backward()
    >>> w.tolist(), w.grad
    ([0.5, 0.5], None)
    """
    if not optimizers:
        yield
        return
    updates = _Updates(enter, before_update)
    with interrupts_held_back(), ExitStack() as hooks:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in (p for p in group["params"] if p.requires_grad):
                    hooks.callback(parameter.register_post_accumulate_grad_hook(partial(updates.update, optimizer, group)).remove)
        with updates.explained():
            yield


class _Updates:
    """Of one backward."""

    def __init__(self, enter: Callable[[str], None], before_update: Sequence[Callable[[torch.Tensor], object]]) -> None:
        self._enter, self._before_update, self._done = enter, before_update, set[torch.Tensor]()
        self._one_at_a_time = threading.Lock()  # with parameters on several devices, backward runs in several threads

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What torch says of a tensor that was written to since it was saved, told as what it is here."""
        try:
            yield
        except RuntimeError as error:
            if not self._done or "modified by an inplace operation" not in str(error):
                raise
            raise MemfitError(_needed_as_it_was(len(self._done))) from error

    def update(self, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Now that the parameter's gradient is there, which comes once."""
        with self._one_at_a_time:
            if parameter in self._done:
                raise MemfitError(_in_parts(parameter, len(self._done)))
            self._done.add(parameter)
            for call in self._before_update:
                call(parameter)
            self._enter("optimizer")
            _step_on(optimizer, group, parameter)
            parameter.grad = None
            self._enter("backward")


def _step_on(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """The optimizer's own step on one parameter: its own state, its group's learning rate of this moment."""
    groups, members = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, members


def _in_parts(parameter: torch.Tensor, updated: int) -> str:
    return (
        "The optimizer's step cannot be taken inside backward: "
        f"the gradient of a parameter of shape {tuple(parameter.shape)} came in parts, "
        f"as it does from a reentrant checkpoint around a module that is called twice. Updates of {updated} parameters are done already, "
        "this one's with a part of its gradient: load the last state you saved, and take the optimizer's lever off, or call checkpoint "
        "with use_reentrant=False."
    )


def _needed_as_it_was(updated: int) -> str:
    return (
        "The optimizer's step cannot be taken inside backward: backward needed a tensor as it was before an update, most likely a weight "
        f"that this step also uses where it gets no gradient, as weight.detach(). Updates of {updated} parameters are done already: load "
        "the last state you saved, and take the optimizer's lever off."
    )
