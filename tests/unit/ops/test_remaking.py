"""Remaking: the same outputs from the same inputs, freed on the way, refused when an input changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memfit.ops.remaking import Kept, Node, Part, remake
from memfit.torch_private import detached

ADD, MUL, SIN = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.sin.default
MUL_ = torch.ops.aten.mul_.Tensor


def part(node: Node, like: torch.Tensor, output: int = 0) -> Part:
    return Part(node, output, like.shape, like.stride(), like.storage_offset())


def test_a_chain_is_made_from_what_was_kept() -> None:
    x = torch.randn(4)
    first = Node(SIN, [Kept(x)], {}, 0)
    second = Node(ADD, [part(first, x), Kept(x)], {"alpha": 2}, 0)
    assert torch.equal(remake(second)[0], x.sin() + 2 * x)
    assert first.outputs is None and second.outputs is None


def test_after_its_times_a_result_stays_and_lets_its_inputs_go() -> None:
    x = torch.randn(4)
    seen = weakref.ref(x)
    node = Node(SIN, [Kept(x)], {}, 2)
    expected = remake(node)[0]
    assert node.outputs is None
    assert torch.equal(remake(node)[0], expected) and node.outputs is not None
    del x
    gc.collect()
    assert seen() is None and remake(node)[0] is node.outputs[0]


def test_what_stays_is_freed_on_the_way_once_nobody_waits_for_it() -> None:
    """A chain of which each result was to stay: as soon as its last user has been made, nothing refers to it."""
    x, alive = torch.randn(4), list[int]()
    made = weakref.WeakSet[torch.Tensor]()

    def counted(value: torch.Tensor) -> torch.Tensor:
        out = value.sin()
        made.add(out)
        alive.append(len(made))
        return out

    node = Node(counted, [Kept(x)], {}, 1)
    for _ in range(5):
        node = Node(counted, [part(node, x)], {}, 1)
    remake(node)
    assert alive == [1, 2, 2, 2, 2, 2]


def test_an_input_written_to_is_refused() -> None:
    x = torch.randn(4)
    node = Node(SIN, [Kept(x)], {}, 0)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        remake(node)


def test_an_in_place_op_does_not_write_over_what_others_need() -> None:
    x = torch.randn(4)
    first = Node(SIN, [Kept(x)], {}, 0)
    written = Node(MUL_, [part(first, x), 3.0], {}, 0)
    written.writes_to_first = True
    both = Node(ADD, [part(first, x), part(written, x)], {}, 0)
    assert torch.equal(remake(both)[0], x.sin() + 3 * x.sin())
    assert torch.equal(remake(written)[0], 3 * x.sin())
    first.times = 1
    remake(first)
    assert torch.equal(remake(written)[0], 3 * x.sin()) and torch.equal(remake(first)[0], x.sin())


def test_a_part_is_cut_as_it_was_saved() -> None:
    x = torch.randn(4, 6)
    node = Node(MUL, [Kept(x), 2.0], {}, 0)
    piece = (x * 2).t()[1:3]
    assert torch.equal(part(node, piece).of(remake(node)), piece)


def test_nothing_is_cast_again_nor_recorded() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    node = Node(torch.ops.aten.mm.default, [Kept(a), Kept(b)], {}, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = remake(node)[0]
    assert torch.equal(again, a @ b) and not again.requires_grad


def test_deep_chains_need_no_recursion() -> None:
    x = torch.zeros(1)
    node = Node(ADD, [Kept(x), 1.0], {}, 0)
    for _ in range(5000):
        node = Node(ADD, [part(node, x), 1.0], {}, 0)
    assert remake(node)[0].item() == 5001


def test_a_detached_tensor_counts_the_same_writes_also_inside_an_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[torch.Tensor] = []

    class Inside(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.extend((detached(args[0]), args[0].detach()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True) * 2
    with Inside():
        x.sigmoid()
    x.mul_(2)
    assert found[0]._version == x._version == 1 and not found[0].requires_grad
    assert found[1]._version == 0  # what torch gives alone
