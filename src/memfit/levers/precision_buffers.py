"""A step's buffers as they were: averages, counts, codebooks that a forward pass changes."""

from __future__ import annotations

import torch

from memfit.step import Step


class BuffersBefore:
    """Remembers the buffers of a step's modules, and puts back the tensors themselves and what was in them.

    >>> net = torch.nn.BatchNorm1d(1)
    >>> before = BuffersBefore(Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters()), torch.ones(2, 1)))
    >>> net.running_mean = net.running_mean + 1; net.num_batches_tracked += 1
    >>> before.put_back(); net.running_mean, net.num_batches_tracked
    (tensor([0.]), tensor(0))
    """

    def __init__(self, step: Step) -> None:
        modules = [module for net in step.models.values() for module in net.modules()]
        self._held = [(module, dict(module._buffers)) for module in modules if module._buffers]  # a forward may assign others
        buffers = dict.fromkeys(b for _, held in self._held for b in held.values() if b is not None and not _is_mask(b))
        self._values = [(b, b.clone()) for b in buffers]

    def put_back(self) -> None:
        """As they were."""
        for module, held in self._held:
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            for buffer, before in self._values:
                if not torch.equal(buffer, before):  # an expanded one cannot be written to, but cannot have changed either
                    buffer.copy_(before)


def _is_mask(buffer: torch.Tensor) -> bool:
    """Tables of yes and no say which entries count; they are large, and nobody counts in them."""
    return buffer.dtype is torch.bool and buffer.dim() > 1
