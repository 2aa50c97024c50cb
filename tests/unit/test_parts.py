"""Parts of nested batches: what has an entry for each sample is cut, the rest is shared."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import Step
from memfit.largest_batch import resized
from memfit.levers import LEVERS
from memfit.parts import sliced
from memfit.proof.sampling import first_samples
from quick_ledgers import seen

Pair = namedtuple("Pair", ["width", "height"])


def weighed(m: Any, b: Any) -> torch.Tensor:
    return torch.stack([w * m(x).pow(2).mean() for x, w in zip(b["x"], b["w"], strict=True)]).mean()


def chunked(m: Any, b: Any) -> torch.Tensor:
    return memfit.chunked(lambda z, w: weighed(m, {"x": z, "w": w}), b["x"], b["w"], parameters=m)


@pytest.mark.parametrize(("lever", "loss"), [("microbatch", weighed), ("chunk", chunked)])
def test_a_list_with_an_entry_for_each_sample_is_cut_like_a_tensor(lever: str, loss: Any) -> None:
    net = nn.Linear(6, 6).double()
    batch = {"x": torch.randn(5, 6, dtype=torch.float64), "w": [1.0, 2.0, 3.0, 4.0, 5.0]}
    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.0), batch)
    step.run(step.batch)
    expected = net.weight.grad
    for option in LEVERS[lever].options(seen(step)):
        with LEVERS[lever].apply(step, option):
            step.run(step.batch)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_what_is_cut_and_what_is_shared() -> None:
    x = torch.arange(3)
    assert sliced([x, ("a", "b", "c"), [("d", "e", "f"), ["g", "h", "i"]]], 3, 1, 2)[1:] == [("b", "c"), [("e", "f"), ["h", "i"]]]
    assert sliced({"x": x, "size": [7, 7], "name": "abc", "of": {"ids": [[1], [2, 3], [4]]}}, 3, 0, 1)["of"] == {"ids": [[1]]}
    assert sliced({"x": x, "size": [7, 7], "name": "abc"}, 3, 0, 1)["size"] == [7, 7]
    assert sliced((x[:2], Pair(3, 4)), 2, 0, 1)[1] == Pair(3, 4)


def test_a_list_of_tensors_is_a_batch_inside_the_batch() -> None:
    first, second = sliced([torch.arange(2), torch.arange(4).view(2, 2)], 2, 1, 1)
    assert first.tolist() == [1] and second.tolist() == [[2, 3]]


def test_fewer_and_more_samples_have_lists_of_their_length() -> None:
    batch = {"x": torch.arange(3.0), "names": ["a", "b", "c"]}
    assert first_samples(batch, 2)["names"] == ["a", "b"]
    net = nn.Linear(1, 1)
    step = Step(net, lambda m, b: m(b["x"][:, None]).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)
    assert resized(step, 5).batch["names"] == ["a", "b", "c", "a", "b"] and resized(step, 2).batch["names"] == ["a", "b"]
