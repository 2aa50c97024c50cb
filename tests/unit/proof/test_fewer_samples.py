"""A plan with micro-batches, proven on a part of its batch: micro-batches get smaller with it, and what was not compared is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import memfit
from memfit.fitting import proven_plans
from memfit.fitting.plan_search import FoundPlan
from memfit.fitting.trial import slowdown_of
from memfit.levers import LEVERS
from memfit.proof import comparing
from memfit.proof.fewer_parts import least_samples, levers_for
from memfit.proof.fitting_sample import Sample
from memfit.proof.sampling import first_samples
from memfit.records import Plan, PlannedLever, Verdict, Worst
from memfit.report.verdict_view import verdict_view
from memfit.step import Step
from memfit.step.running import Running
from small_levers import CHECKPOINT, WRONG, plan_of
from small_steps import sgd, transformer


def in_halves(step: Step) -> Plan:
    option = LEVERS["microbatch"].options(memfit.profile(step, simulate=True))[0]
    row = PlannedLever("microbatch", option.name, option.exactness, settings=option.settings)
    return replace(plan_of(step), levers=(row,), exactness=option.exactness)


def verified_on(samples: int, step: Step, plan: Plan, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Verdict:
    few = replace(step, batch=first_samples(step.batch, samples))
    monkeypatch.setattr(comparing, "sample_inside", lambda *asked, **wishes: Sample(few))
    return memfit.verify(step, plan, limit_bytes=1, **options)


def contrastive() -> Step:
    net = torch.nn.Linear(8, 8)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(x)))

    return Step(net, loss, sgd(net), torch.randn(8, 8))


def test_micro_batches_are_still_divided_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    step = transformer()
    assert verified_on(2, step, in_halves(step), monkeypatch).equivalent
    coupled = contrastive()
    verdict = verified_on(4, coupled, in_halves(coupled), monkeypatch)
    assert not verdict.equivalent and verdict.culprit == "microbatch"
    assert "the loss compares samples with each other (a contrastive loss" in verdict.culprit_because
    assert ("Because", verdict.culprit_because) in verdict_view(verdict).facts


def test_what_a_single_sample_cannot_show_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (transformer(), contrastive()):  # right, and wrong: neither shows
        verdict = verified_on(1, step, in_halves(step), monkeypatch)
        assert not verdict.equivalent and verdict.not_compared == ("microbatch",) and verdict.levers == () and verdict.samples == 1
        assert verdict.notes[0].startswith("microbatch was not compared, and nothing is claimed of it: a single sample cannot be divided")
        assert "It is all the plan does, so nothing was proven." in verdict.notes[0]


def test_the_other_levers_of_a_plan_are_proven_and_the_verdict_is_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    step = transformer()
    plan = in_halves(step)
    both = replace(plan, levers=(*plan.levers, *plan_of(step, CHECKPOINT).levers))
    verdict = verified_on(1, step, both, monkeypatch, levers={**LEVERS, "checkpoint": CHECKPOINT})
    assert not verdict.equivalent and verdict.unproven and (verdict.levers, verdict.not_compared) == (("checkpoint",), ("microbatch",))
    assert verdict.exactness == "bitwise" and "The other levers were." in verdict.notes[0] and not verdict.culprit
    wrong = replace(plan, levers=(*plan.levers, *plan_of(step, WRONG["weakened"]).levers))
    verdict = verified_on(1, step, wrong, monkeypatch, levers={**LEVERS, "weakened": WRONG["weakened"]})
    assert not verdict.equivalent and not verdict.unproven and verdict.culprit == "weakened"


def test_the_screen_does_not_claim_more() -> None:
    verdict = Verdict(False, "bitwise", {}, Worst("", 0.0, 0.0), {}, ("saved",), not_compared=("microbatch",))
    view = verdict_view(verdict)
    assert view.answer == "Not proven" and ("Left out", "microbatch") in view.facts
    assert view.meaning == "With saved it is the same training, bit for bit; with microbatch too, it could not be proven here."
    nothing = verdict_view(replace(verdict, levers=()))
    assert nothing.answer == "Not proven" and nothing.meaning == "Whether the fitted step is the same training is not known."


def test_a_fit_that_could_not_be_proven_is_refused_with_the_ways_out_and_a_wrong_one_with_its_lever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = transformer()
    plan, plain = in_halves(step), memfit.profile(step, simulate=True)
    monkeypatch.setattr(proven_plans, "find_plan", lambda *asked, **wishes: FoundPlan(plan, plain, plain))
    few = replace(step, batch=first_samples(step.batch, 1))
    monkeypatch.setattr(comparing, "sample_inside", lambda *asked: Sample(few))
    alone = plan
    for tried in (alone, replace(alone, levers=(*alone.levers, *plan_of(step, CHECKPOINT).levers))):
        plan = tried
        with pytest.raises(
            memfit.NotEquivalent, match=r"^It could not be proven here that the fitted step is the same training: microbatch"
        ) as no:
            memfit.fit(step, "8GiB", levers={**LEVERS, "checkpoint": CHECKPOINT})
        assert (
            all(way in str(no.value) for way in ("a larger limit or budget", "memfit plan -o", "smaller_batch")) and no.value.exit_code == 1
        )
        assert step.running == Running()
    plan = replace(alone, levers=tuple(replace(lever, exactness="redrawn") for lever in alone.levers))
    fitted = memfit.fit(step, "8GiB", allow="redrawn")  # asked for, and not proven
    assert not fitted.verdict.equivalent and fitted.verdict.not_compared == ("microbatch",)
    assert slowdown_of(fitted) == (plan.predicted_slowdown, "predicted")
    fitted.undo()
    plan = replace(alone, levers=(*alone.levers, *plan_of(step, WRONG["weakened"]).levers))
    with pytest.raises(memfit.NotEquivalent, match="weakened"):
        memfit.fit(step, "8GiB", levers={**LEVERS, "weakened": WRONG["weakened"]})


def test_a_loss_whose_batch_cannot_be_divided_is_planned_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, words = contrastive(), list[str]()
    summed = replace(step, loss=lambda m, x: m(x).pow(2).sum())
    plan, other, plain = in_halves(summed), plan_of(summed, CHECKPOINT), memfit.profile(summed, simulate=True)
    offer = lambda step, budget, *, levers, **options: FoundPlan(plan if "microbatch" in levers else other, plain, plain)  # noqa: E731
    monkeypatch.setattr(proven_plans, "find_plan", offer)
    fitted = memfit.fit(summed, "8GiB", levers={**LEVERS, "checkpoint": CHECKPOINT}, progress=words.append)
    assert fitted.plan.levers == other.levers and fitted.verdict.equivalent and fitted.step.running.levers_on == ["checkpoint"]
    assert fitted.verdict.notes[0] in words and fitted.verdict.notes[0].startswith("Planned without microbatch, which failed the proof.")
    assert "the loss is a sum over the batch, not a mean" in fitted.verdict.notes[0]


def test_where_nothing_fits_without_the_lever_that_failed_both_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = contrastive()
    plan, plain = in_halves(step), memfit.profile(step, simulate=True)

    def planned(step: Step, budget: object, *, levers: dict[str, Any], **options: Any) -> FoundPlan:
        if "microbatch" in levers:
            return FoundPlan(plan, plain, plain)
        raise memfit.Infeasible("Nothing fits.", 7, {"reordered": 9})

    monkeypatch.setattr(proven_plans, "find_plan", planned)
    with pytest.raises(memfit.Infeasible, match=r"(?s)^Nothing fits\.\nPlanned without microbatch, which failed the proof\. The") as no:
        memfit.fit(step, "8GiB")
    assert "the loss compares samples with each other" in str(no.value) and no.value.lowest_bytes == 7
    assert step.running == Running()


def test_other_levers_are_compared_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    step = transformer()
    verdict = verified_on(1, step, plan_of(step, CHECKPOINT), monkeypatch, levers={"checkpoint": CHECKPOINT})
    assert verdict.equivalent and verdict.notes == ()


def large_pictures(side: int = 2048) -> Step:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(16, 3, 3, padding=1))
    return Step(net, lambda model, x: (model(x) - x).pow(2).mean(), sgd(net), torch.randn(1, 3, side, side))


def just_too_little(step: Step) -> int:
    return memfit.profile(step, simulate=True).process_low_bytes - 1


def test_where_one_sample_does_not_fit_a_smaller_one_is_compared() -> None:
    step = large_pictures()
    levers, limit, smaller = {"checkpoint": CHECKPOINT}, just_too_little(step), torch.randn(1, 3, 32, 32)
    before = memfit.profile(step, simulate=True).process_high_bytes  # what this process holds itself may shrink meanwhile, or grow
    with pytest.raises(memfit.Infeasible, match=r"a single sample is predicted to need .* in Python a smaller_batch") as no:
        memfit.verify(step, plan_of(step, CHECKPOINT), limit_bytes=1, levers=levers)
    assert "Give a larger --budget or --limit, or write the plan here (memfit plan -o) and prove it where there is more" in str(no.value)
    most = max(before, memfit.profile(step, simulate=True).process_high_bytes) + step.batch.nbytes  # of a later step's batch
    assert 1 < no.value.lowest_bytes <= most
    verdict = memfit.verify(step, plan_of(step, CHECKPOINT), limit_bytes=limit, smaller_batch=smaller, levers=levers)
    assert verdict.equivalent and "Compared on the smaller batch that was given (1×3×32×32)" in verdict.notes[0]


def test_a_wrong_lever_shows_on_the_smaller_sample_too() -> None:
    step = large_pictures()
    modified = WRONG["modified"]
    plan, limit = plan_of(step, modified), just_too_little(step)
    verdict = memfit.verify(step, plan, limit_bytes=limit, smaller_batch=torch.randn(1, 3, 32, 32), levers={modified.name: modified})
    assert not verdict.equivalent and verdict.culprit == modified.name


def test_a_smaller_batch_that_is_not_small_enough_is_refused() -> None:
    step = large_pictures()
    with pytest.raises(
        memfit.Infeasible, match=r"The smaller_batch is not small enough.* Give a smaller one, or a larger budget or limit\."
    ):
        memfit.verify(step, plan_of(step), limit_bytes=just_too_little(step), smaller_batch=step.batch)


def chunked_row(step: Step, size: int) -> Plan:
    """In chunks of this many samples, as the planner offers it."""
    options = LEVERS["chunk"].options(memfit.profile(step, simulate=True))
    option = next(option for option in options if option.settings["size"] == size)
    return replace(plan_of(step), levers=(PlannedLever("chunk", option.name, option.exactness, settings=option.settings),))


def decoded(compares: bool) -> Step:
    """A loss behind memfit.chunked, with dropout; whether it `compares` samples, which no chunk alone can."""
    net = torch.nn.ModuleDict(
        {"project": torch.nn.Linear(8, 8), "decoder": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3))}
    )
    net["decoder"].requires_grad_(False)

    def part(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = net["decoder"](z)
        return (y - x - (y.mean(0, keepdim=True) if compares else 0)).pow(2).mean()

    return Step(net, lambda m, x: memfit.chunked(part, m["project"](x), x), sgd(net["project"]), torch.randn(16, 8))


def test_chunks_are_still_several_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight samples chunks of eight would be the plain step, and any loss would pass."""
    step = decoded(compares=False)
    for samples in (8, 2):
        assert verified_on(samples, step, chunked_row(step, 8), monkeypatch).equivalent
    wrong = decoded(compares=True)
    plan = replace(chunked_row(step, 8), step=plan_of(wrong).step)  # the planner itself sees that this loss cannot be cut
    verdict = verified_on(8, wrong, plan, monkeypatch)
    assert not verdict.equivalent and verdict.culprit == "chunk"


def test_chunks_of_a_single_sample_are_not_claimed_but_one_of_the_whole_batch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step = decoded(compares=False)
    verdict = verified_on(1, step, chunked_row(step, 8), monkeypatch)
    assert verdict.unproven and verdict.not_compared == ("chunk",)
    assert verdict.notes[0].startswith("chunk was not compared, and nothing is claimed of it: a single sample cannot be divided, and two")
    assert verified_on(1, step, chunked_row(step, 16), monkeypatch).equivalent


def rows(micro: int = 0, chunk: int = 0, compiled: int = 0) -> list[PlannedLever]:
    sizes = {"chunk": chunk, "microbatch": micro}
    found = [PlannedLever(name, "", "reordered", settings={"size": size, "batch": 16}) for name, size in sizes.items() if size]
    split = {"modules": [], "budget": 1.0, "split": {"size": compiled, "batch": 16}}
    return found + ([PlannedLever("compile", "", "reordered", settings=split)] if compiled else [])


@pytest.mark.parametrize(
    ("planned", "samples", "left", "least"),
    [
        (rows(micro=8), 4, {"microbatch": 2}, 2),
        (rows(chunk=8), 4, {"chunk": 2}, 2),
        (rows(chunk=8), 1, {}, 2),
        (rows(compiled=4), 8, {"compile": 2}, 2),
        (rows(compiled=4), 1, {}, 2),
        (rows(micro=8, chunk=4), 8, {"chunk": 2, "microbatch": 4}, 4),
        (rows(micro=8, chunk=4), 2, {"microbatch": 1}, 4),  # chunks of one, of micro-batches of one
        (rows(micro=4, chunk=8), 2, {"chunk": 1, "microbatch": 1}, 2),  # the chunk is a whole micro-batch in training as well
        (rows(chunk=16), 1, {"chunk": 1}, 1),
    ],
)
def test_every_lever_that_takes_parts_gets_smaller_ones(
    planned: list[PlannedLever], samples: int, left: dict[str, int], least: int
) -> None:
    found = levers_for(planned, 16, samples)
    assert {row.name: row.settings.get("split", row.settings)["size"] for row in found} == left
    assert least_samples(planned, 16) == least and levers_for(planned, 16, 16) == tuple(planned)


def test_too_few_samples_for_chunks_of_micro_batches_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = decoded(compares=False)
    both = replace(plan_of(step), levers=(*chunked_row(step, 4).levers, *in_halves(step).levers))
    verdict = verified_on(2, step, both, monkeypatch)
    assert verdict.unproven and (verdict.levers, verdict.not_compared) == (("microbatch",), ("chunk",))
    assert "2 samples are too few for it to divide, and more do not fit the limit. The other levers were." in verdict.notes[0]
