"""Three published ways to save on c⊗c, as their authors wrote them down, with what they really are. For comparison only."""

from __future__ import annotations

import torch

EXACTNESS = {"conditional": "altered", "low_rank": "altered", "chunked": "bitwise"}
"""None lowers the peak: each makes a tensor of [B, E, E]; only a batch whose conditions are all zero gets none from `conditional`,
and None is not the same as zeros, whose keys and values are the convolution's bias."""


def conditional(condition: torch.Tensor) -> torch.Tensor | None:
    """Outer products of the samples that are not zero, in a full tensor of zeros; None if all are zero.

    >>> conditional(torch.zeros(2, 3)) is None, conditional(torch.ones(2, 3)).shape
    (True, torch.Size([2, 3, 3]))
    """
    active = condition.abs().amax(1) > 1e-6
    if not bool(active.any()):
        return None
    which = active.nonzero().squeeze(-1)
    full = condition.new_zeros(condition.shape[0], condition.shape[1], condition.shape[1])
    full[which] = torch.einsum("ab,ac->abc", condition[which], condition[which])
    return full


def low_rank(condition: torch.Tensor, rank_ratio: float = 0.125) -> torch.Tensor:
    """Outer products of a batch whose matrix of conditions is cut to a lower rank: over the batch, so of the same size as before.

    >>> c = torch.randn(2, 16)
    >>> low_rank(c).shape, torch.allclose(low_rank(c), torch.einsum("ab,ac->abc", c, c), atol=1e-4)  # rank 2 of 2: nothing was cut
    (torch.Size([2, 16, 16]), True)
    """
    rank = max(1, int(condition.shape[1] * rank_ratio))
    left, sizes, right = torch.linalg.svd(condition, full_matrices=False)
    reduced = left[:, :rank] @ torch.diag_embed(sizes[:rank]) @ right[:rank]
    return torch.einsum("ab,ac->abc", reduced, reduced)


def chunked(condition: torch.Tensor, chunk_size: int = 8) -> torch.Tensor:
    """Outer products of a few samples at a time, then all of them joined: the same tensor, and for a moment twice.

    >>> c = torch.randn(5, 4)
    >>> torch.equal(chunked(c, 2), torch.einsum("ab,ac->abc", c, c))
    True
    """
    return torch.cat([torch.einsum("ab,ac->abc", part, part) for part in condition.split(chunk_size)])
