"""Batches whose samples are not alike, and batches that hold more than samples: nothing is cut that must stay whole, or missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit import Step
from memfit.fitting.largest_batch import largest_batch, resized
from memfit.levers import LEVERS
from memfit.proof.separable import why_not_separable
from memfit.step.batches import batch_size
from quick_ledgers import seen


def stepped(net: nn.Module, loss: Any, batch: Any) -> Step:
    return Step(net, loss, torch.optim.SGD(net.parameters(), 0.0), batch)


def test_a_simulation_runs_the_micro_batch_with_the_largest_sample() -> None:
    net = nn.Linear(64, 64)
    points = [{"p": torch.randn(100_000 if sample == 3 else 10, 64)} for sample in range(8)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        return torch.stack([m(sample["p"]).pow(2).mean() for sample in b["points"]]).mean()

    step = stepped(net, loss, {"x": torch.randn(8, 4), "points": points})
    with LEVERS["microbatch"].apply(step, LEVERS["microbatch"].options(seen(step))[-1]):
        predicted, measured = memfit.profile(step, simulate=True).peak_bytes, memfit.profile(step).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.01) and measured > 2 * 100_000 * 64 * 4


@pytest.mark.parametrize("lever", ["microbatch", "chunk"])
def test_in_a_last_batch_as_long_as_there_are_classes_their_weights_stay_whole(lever: str) -> None:
    net = nn.Linear(6, 3).double()

    def of(z: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (net(z) * weights).pow(2).mean()

    def batch(samples: int) -> Any:
        return {"x": torch.randn(samples, 6, dtype=torch.float64), "w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}

    step = stepped(net, lambda m, b: memfit.chunked(of, b["x"], b["w"], parameters=m), batch(4))
    with LEVERS[lever].apply(step, LEVERS[lever].options(seen(step))[-1]):
        step.run(step.batch)
        last = batch(3)
        step.run(last)
        found = net.weight.grad
    step.run(last)
    torch.testing.assert_close(found, net.weight.grad, rtol=1e-10, atol=1e-12)


def test_chunks_inside_micro_batches_of_which_the_last_is_as_long_as_there_are_classes() -> None:
    net = nn.Linear(6, 3).double()

    def loss(m: Any, b: Any) -> torch.Tensor:
        return memfit.chunked(lambda z, weights: (m(z) * weights).pow(2).mean(), b["x"], b["w"], parameters=m)

    def batch(samples: int) -> Any:
        return {"x": torch.randn(samples, 6, dtype=torch.float64), "w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}

    step = stepped(net, loss, batch(8))
    parts, chunks = (LEVERS[lever].options(seen(step)) for lever in ("microbatch", "chunk"))
    of_four = next(option for option in parts if option.settings["size"] == 4)
    last = batch(7)
    step.run(last)
    expected = net.weight.grad
    with LEVERS["microbatch"].apply(step, of_four), LEVERS["chunk"].apply(step, chunks[-1]):
        step.run(last)
    torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_what_has_no_row_for_each_sample_does_not_get_smaller() -> None:
    """4096 rows are no four samples' rows, though four goes into them: each micro-batch has all of them."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    batch = {"weights": torch.ones(4), "x": torch.randn(4096, 64)}
    step = stepped(net, lambda m, b: m(b["x"]).pow(2).mean() * b["weights"].mean(), batch)
    plain, option = seen(step), LEVERS["microbatch"].options(seen(step))[-1]
    with LEVERS["microbatch"].apply(step, option):
        captured = memfit.profile(step, simulate=True)
    predicted = LEVERS["microbatch"].rewrite(plain, option)
    assert predicted.peak_bytes == pytest.approx(captured.peak_bytes, rel=0.02)
    assert captured.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.02)


@pytest.fixture
def uncuttable() -> Step:
    """The batch's first tensor has no samples."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.GELU())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        if len(b["weights"]) != 4:
            raise AssertionError("four classes")
        return (m(b["x"]) * b["weights"]).pow(2).mean()

    return stepped(nn.Sequential(*layers, nn.Linear(128, 4)), loss, {"weights": torch.ones(4), "x": torch.randn(32768, 128)})


def test_a_batch_that_cannot_be_cut_is_fitted_and_proven_whole(uncuttable: Step) -> None:
    plain = memfit.profile(uncuttable, simulate=True)
    fitted = memfit.fit(uncuttable, plain.process_high_bytes - plain.peak_bytes // 4)
    assert fitted.verdict.equivalent and fitted.plan.levers and all(lever.name != "microbatch" for lever in fitted.plan.levers)
    fitted.undo()


def test_a_batch_that_cannot_grow_is_told(uncuttable: Step) -> None:
    with pytest.raises(memfit.MemfitError, match=r"does not take a batch of 8 .*AssertionError: four classes.*put one that has a row"):
        largest_batch(uncuttable, 16 * 2**30)


def test_samples_that_do_not_go_in_another_order_are_compared_as_they_are() -> None:
    """Offsets begin with 0, in every order."""
    net = nn.EmbeddingBag(16, 3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        labels, text, offsets = b
        return F.cross_entropy(m(text, offsets), labels)

    step = stepped(net, loss, (torch.tensor([0, 2]), torch.arange(9), torch.tensor([0, 4])))
    verdict = memfit.fit(step, "64GiB").verdict
    assert verdict.equivalent and any(
        "All steps ran on the same batch: with its samples in another order" in note for note in verdict.notes
    )


def images(*boxes: int) -> list[dict[str, torch.Tensor]]:
    return [{"image": torch.randn(3, 8, dtype=torch.float64), "boxes": torch.randn(n, 4, dtype=torch.float64)} for n in boxes]


@pytest.mark.parametrize("boxes", [(2, 5, 1, 4), (2, 5, 1), (3, 3, 4)])
def test_a_list_with_one_dict_for_each_sample_is_a_batch(boxes: tuple[int, ...]) -> None:
    net = nn.Linear(8, 4).double()

    def loss(m: Any, b: Any) -> torch.Tensor:
        return torch.stack([(m(sample["image"]).mean(0) * sample["boxes"]).pow(2).sum() for sample in b]).mean()

    step = stepped(net, loss, images(*boxes))
    assert step.batch_size == len(boxes)
    step.run(step.batch)
    expected = net.weight.grad
    for option in LEVERS["microbatch"].options(seen(step)):
        with LEVERS["microbatch"].apply(step, option):
            step.run(step.batch)
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-10, atol=1e-12)


def test_targets_before_the_images_do_not_tell_the_number_of_samples() -> None:
    assert batch_size({"targets": [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(5, 4)}], "x": torch.zeros(2, 3)}) == 2
    assert batch_size([{"x": torch.zeros(4, 2)}, {"x": torch.zeros(4, 2)}]) == 4  # two views of four samples
    assert batch_size(({"x": torch.zeros(4, 2), "weights": torch.zeros(9)}, {"y": torch.zeros(4)})) == 4  # inputs and targets


def test_chunks_of_dicts_have_the_samples_of_the_first() -> None:
    net = nn.Linear(2, 1)
    given = {"z": torch.randn(4, 2), "weights": torch.ones(9)}
    sizes: list[int] = []

    def decode(b: Any) -> torch.Tensor:
        sizes.append(len(b["z"]))
        return net(b["z"]).mean() * b["weights"].sum()

    memfit.chunked(decode, given, size=1, parameters=net).backward()
    assert sizes == [1, 1, 1, 1]


def test_a_mean_with_weights_of_classes_is_separable() -> None:
    net = nn.Linear(6, 4)
    step = stepped(net, lambda m, b: (m(b["x"]) * b["w"]).pow(2).mean(), {"x": torch.randn(8, 6), "w": torch.arange(1.0, 5.0)})
    assert why_not_separable(step, LEVERS["microbatch"].options(seen(step))[0]) == ""
    wrong = replace(step, running=replace(step.running, places={}))  # as if nothing was known of the whole batch
    assert "do not give the gradients they give together" in why_not_separable(wrong, LEVERS["microbatch"].options(seen(step))[0])


def test_a_larger_batch_has_tensors_of_its_own() -> None:
    step = stepped(
        nn.Linear(3, 1), lambda m, b: m(b["x"]).mean(), {"x": torch.zeros(2, 3), "masks": [{"m": torch.ones(9)}, {"m": torch.ones(4)}]}
    )
    masks = resized(step, 6).batch["masks"]
    assert len({mask["m"].data_ptr() for mask in masks}) == 6
