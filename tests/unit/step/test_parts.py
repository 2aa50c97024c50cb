"""Parts of nested batches: what has an entry for each sample is cut, the rest is shared."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import Step
from memfit.fitting.largest_batch import resized
from memfit.levers import LEVERS
from memfit.proof.sampling import first_samples
from memfit.step.parts import sliced
from memfit.step.samples import sample_places
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


def targets(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.randn(count, 4, dtype=torch.float64), "image": torch.tensor(number)} for number, count in enumerate(counts)]


def detection(m: Any, b: Any) -> torch.Tensor:
    """As in detection, a sample's prediction meets its own targets, of which each has another number."""
    pairs = zip(m(b["x"]), b["targets"], strict=True)
    return torch.stack([(target["boxes"] * predicted).pow(2).sum() for predicted, target in pairs]).mean()


def chunked_detection(m: Any, b: Any) -> torch.Tensor:
    return memfit.chunked(lambda x, t: detection(m, {"x": x, "targets": t}), b["x"], b["targets"], parameters=m)


@pytest.mark.parametrize(("lever", "loss"), [("microbatch", detection), ("chunk", chunked_detection)])
@pytest.mark.parametrize("counts", [(2, 5, 1, 0, 3), (5, 5, 5, 5, 1)])
def test_one_dict_for_each_sample_is_cut_like_a_tensor(lever: str, loss: Any, counts: tuple[int, ...]) -> None:
    net = nn.Linear(6, 4).double()
    batch = {"x": torch.randn(5, 6, dtype=torch.float64), "targets": targets(*counts)}
    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.0), batch)
    option = LEVERS[lever].options(seen(step))[-1]
    later = {"x": torch.randn(5, 6, dtype=torch.float64), "targets": targets(5, 5, 5, 5, 5)}  # every one as long as the batch
    expected = []
    for given in (batch, later):
        step.run(given)
        expected.append(net.weight.grad)
    with LEVERS[lever].apply(step, option):
        for given, gradient in zip((batch, later), expected, strict=True):
            step.run(given)
            torch.testing.assert_close(net.weight.grad, gradient, rtol=1e-10, atol=1e-12)


def test_dicts_with_a_row_for_each_sample_are_views_of_the_whole_batch() -> None:
    views = [{"x": torch.arange(2), "scale": torch.tensor(1)}, {"x": torch.arange(2, 4), "scale": torch.tensor(2)}]
    assert [view["x"].tolist() for view in sliced(views, 2, 1, 1)] == [[1], [3]]


def test_a_last_batch_as_long_as_something_else_is_cut_like_the_others() -> None:
    """Three classes' weights are not three samples."""
    net = nn.Linear(6, 3).double()

    def loss(m: Any, b: Any) -> torch.Tensor:
        return (m(b["x"]) * b["weights"]).pow(2).mean()

    def batch(samples: int) -> Any:
        return {"x": torch.randn(samples, 6, dtype=torch.float64), "weights": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}

    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.0), batch(4))
    last = batch(3)
    step.run(last)
    expected = net.weight.grad
    with LEVERS["microbatch"].apply(step, LEVERS["microbatch"].options(seen(step))[-1]):
        step.run(last)
    torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_what_was_one_for_each_sample_and_is_not_any_more() -> None:
    places = sample_places({"x": torch.zeros(3), "classes": torch.zeros(3)}, 3)
    with pytest.raises(memfit.MemfitError, match=r"batch\['classes'\] had one entry for each sample in the step's batch, and has 3 for 2"):
        sliced({"x": torch.zeros(2), "classes": torch.zeros(3)}, 2, 0, 1, places)


def test_arrays_are_cut_like_tensors() -> None:
    batch = {"x": torch.arange(3), "lengths": np.array([4, 5, 6]), "grid": np.zeros((2, 2))}
    part = sliced(batch, 3, 1, 2)
    assert part["lengths"].tolist() == [5, 6] and part["grid"].shape == (2, 2)
    net = nn.Linear(1, 1)
    step = Step(net, lambda m, b: m(b["x"][:, None].float()).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)
    assert resized(step, 5).batch["lengths"].tolist() == [4, 5, 6, 4, 5]


def test_fewer_and_more_samples_have_lists_of_their_length() -> None:
    batch = {"x": torch.arange(3.0), "names": ["a", "b", "c"]}
    assert first_samples(batch, 2)["names"] == ["a", "b"]
    net = nn.Linear(1, 1)
    step = Step(net, lambda m, b: m(b["x"][:, None]).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)
    assert resized(step, 5).batch["names"] == ["a", "b", "c", "a", "b"] and resized(step, 2).batch["names"] == ["a", "b"]


def test_where_the_loss_does_not_take_parts_there_is_a_plan_without_micro_batches() -> None:
    """The first tensor tells the number of samples, and here it has none: half of the classes' weights fit nothing."""
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    batch = {"weights": torch.ones(4), "x": torch.randn(16384, 64)}
    step = Step(net, lambda m, b: (m(b["x"]) * b["weights"]).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), batch)
    plain = memfit.profile(step, simulate=True)
    plan = memfit.plan(step, plain.process_high_bytes - plain.peak_bytes // 8)
    assert plan.levers and all(lever.name != "microbatch" for lever in plan.levers)
    with pytest.raises(memfit.Infeasible):
        memfit.plan(step, plain.process.base_bytes + plain.peak_bytes // 8, levers={"microbatch": LEVERS["microbatch"]})


def test_a_proof_on_fewer_samples_leaves_what_all_share_whole() -> None:
    """Two of four samples, and two classes."""
    net = nn.Linear(6, 2).double()
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "weights": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    step = Step(net, lambda m, b: (m(b["x"]) * b["weights"]).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.0), batch)
    fewer = replace(step, batch=first_samples(batch, 2, step.running.places))
    step.run(fewer.batch)
    expected = net.weight.grad
    with LEVERS["microbatch"].apply(fewer, LEVERS["microbatch"].options(seen(step))[-1]):
        fewer.run(fewer.batch)
    torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)
