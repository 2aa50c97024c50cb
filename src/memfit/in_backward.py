"""The optimizer's step, taken parameter by parameter while backward runs, so that each gradient can go at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.running import interrupts_held_back


@contextmanager
def stepped_in_backward(optimizers: Sequence[Optimizer], enter: Callable[[str], None]) -> Iterator[None]:
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
    one_at_a_time = threading.Lock()  # with parameters on several devices, backward runs in several threads
    with interrupts_held_back(), ExitStack() as hooks:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                step = _step_of(optimizer, group, enter, one_at_a_time)
                for parameter in (p for p in group["params"] if p.requires_grad):
                    hooks.callback(parameter.register_post_accumulate_grad_hook(step).remove)
        yield


def _step_of(
    optimizer: Optimizer, group: dict[str, Any], enter: Callable[[str], None], lock: threading.Lock
) -> Callable[[torch.Tensor], None]:
    """The optimizer's own step on one parameter: its own state, its group's learning rate of this moment."""

    def step(parameter: torch.Tensor) -> None:
        with lock:
            enter("optimizer")
            groups, members = optimizer.param_groups, group["params"]
            optimizer.param_groups, group["params"] = [group], [parameter]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups, group["params"] = groups, members
            parameter.grad = None
            enter("backward")

    return step
