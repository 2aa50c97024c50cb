"""saved: what is put on comes off, after exceptions too, and nothing outlives the backward it was for."""

from __future__ import annotations

import gc
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lever_law import differences, furniture, made, state_after
from memfit import Step, profile
from memfit.levers import LEVERS, CannotApply
from memfit.levers.saved import table_option
from memfit.levers.saved.apply import apply_tables
from memfit.levers.saved.table import CACHE, DISK, RECOMPUTE, Decision, PhaseTable, Region, make_tables
from memfit.records import Option
from saved_steps import STEPS, bits_after, plain_bits, put_on, spread
from small_steps import sgd

IN_BACKWARD = Option("optimizer", "step inside backward", "bitwise", {"how": "in backward"})


def gradients(step: Step) -> list[torch.Tensor]:
    return [p.grad.clone() for m in step.models.values() for p in m.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["residual", "two_phases", "called_twice", "recurrent"])
def test_undo_leaves_nothing(name: str) -> None:
    step = made(STEPS[name])
    before = furniture(step)
    undo = put_on(name, step, spread(name, [RECOMPUTE, DISK]))
    assert furniture(step) != before
    step.run(step.batch)
    undo()
    assert furniture(step) == before


class Masked(nn.Module):
    """Makes a mask where it cannot look at values, as attention in libraries does that skips one of nothing but ones."""

    def __init__(self, always_skips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.always_skips = always_skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.always_skips and isinstance(x, FakeTensor):
            mask = torch.arange(64) + 1 + torch.arange(64)
            assert mask.shape == x.shape[1:]
        for layer in self.layers:
            x = x + layer(x).tanh().exp() + x
        return x


def masked(always_skips: bool) -> Step:
    net = Masked(always_skips)
    return Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(512, 64))


def test_a_mask_that_only_a_simulation_makes_does_not_shift_the_table() -> None:
    """Its sums come before those whose results are made again."""
    peaks = []
    for always_skips in (True, False):
        step = made(lambda skips=always_skips: masked(skips))
        trace = profile(step, simulate=True).trace
        assert trace is not None
        sums = [n for n, op in enumerate(trace.ops) if op.phase == "forward" and op.name == "aten.add.Tensor"]
        ops = {n: RECOMPUTE for n in sums if trace.ops[n].followed}
        assert len(ops) == 12 and len(sums) == (12 if always_skips else 14)
        with LEVERS["saved"].apply(step, table_option(trace, ops, "sums made again")):
            peaks.append(profile(step).peak_bytes)
    assert peaks[0] == peaks[1] < profile(masked(True)).peak_bytes


def test_an_empty_table_installs_nothing() -> None:
    step = made(STEPS["residual"])
    before = furniture(step)
    with apply_tables(step, {}):
        assert furniture(step) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("words", [[RECOMPUTE], [DISK, CACHE]])
def test_an_exception_in_the_middle_of_forward(error: type[BaseException], words: list[str]) -> None:
    name, step = "residual", made(STEPS["residual"])
    before = furniture(step)
    model: Any = step.models[""]

    def stop(*_: object) -> None:
        raise error

    with put_on(name, step, spread(name, words)):
        stopping = model[3].second.register_forward_hook(stop)
        with warnings.catch_warnings(), pytest.raises(error):
            warnings.simplefilter("error")  # nothing is said of a step that did not come to its end
            step.run(step.batch)
        assert _get_current_dispatch_mode_stack() == []
        assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
        stopping.remove()
        fresh = made(STEPS[name])
        step.models[""].load_state_dict(fresh.models[""].state_dict())
        assert differences(plain_bits(name), bits_after(step)) == []  # the table still works
    assert furniture(step) == before
    assert differences(plain_bits(name), bits_after(made(STEPS[name]))) == []  # and leaves plain steps alone


def test_a_second_backward_through_the_same_graph() -> None:
    name, step, plain = "residual", made(STEPS["residual"]), made(STEPS["residual"])
    with put_on(name, step, spread(name, [RECOMPUTE, CACHE, "recompute twice", DISK])):
        for one in (step, plain):
            with one.running.surroundings(""):
                loss = one.loss(one.model, one.batch)  # type: ignore[misc]
            loss.backward(retain_graph=True)
            loss.backward()
    assert all(map(torch.equal, gradients(step), gradients(plain)))


@pytest.mark.parametrize("word", [RECOMPUTE, CACHE])
def test_a_parameter_changed_between_forward_and_backward_is_refused(word: str) -> None:
    step = made(STEPS["dense"])
    with put_on("dense", step, spread("dense", [word])):
        with step.running.surroundings(""):
            loss = step.loss(step.model, step.batch)  # type: ignore[misc]
        with torch.no_grad():
            step.models[""].get_parameter("0.weight").add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("words", [[RECOMPUTE], [CACHE], ["recompute twice", RECOMPUTE], [DISK, RECOMPUTE]])
@pytest.mark.parametrize("name", ["self_conditioned", "dense", "residual", "transformer"])
def test_what_needs_a_weight_is_made_again_before_that_is_updated_inside_backward(name: str, words: list[str]) -> None:
    step, plain = made(STEPS[name]), made(STEPS[name])
    before = furniture(step)
    with put_on(name, step, spread(name, words)), LEVERS["optimizer"].apply(step, IN_BACKWARD):
        assert differences(state_after(plain), state_after(step)) == []
    assert furniture(step) == before


@pytest.mark.parametrize("words", [[RECOMPUTE], [DISK, CACHE]])
def test_a_ragged_batch(words: list[str]) -> None:
    name, step, plain = "residual", made(STEPS["residual"]), made(STEPS["residual"])
    with put_on(name, step, spread(name, words)):
        for size in (2, 1, 3):
            batch = torch.randn(size, 3, 12, 12)
            losses = [one.run(batch)[""] for one in (step, plain)]
            assert torch.equal(*losses) and all(map(torch.equal, gradients(step), gradients(plain)))


def test_a_step_that_leaves_the_trace_is_right_and_says_so() -> None:
    """Layers are skipped: other operators, fewer of them, the table's numbers fall on the wrong ones."""
    name, step, plain = "residual", made(STEPS["residual"]), made(STEPS["residual"])
    with put_on(name, step, spread(name, [RECOMPUTE, CACHE, DISK])):
        for one in (step, plain):
            net: Any = one.models[""]
            net[4] = nn.Sequential(nn.Tanh(), nn.Conv2d(8, 8, 1))
            net[3].relu = nn.SiLU()
            net[4][1].load_state_dict({"weight": torch.ones(8, 8, 1, 1) / 8, "bias": torch.zeros(8)})
        with pytest.warns(UserWarning, match="differs from the one that was planned"):
            loss = step.run(step.batch)[""]
    assert torch.equal(loss, plain.run(plain.batch)[""])
    assert all(map(torch.equal, gradients(step), gradients(plain)))


def watching(**words: str) -> dict[str, PhaseTable]:
    """Decisions for single modules of `written_outside`, which writes to what the first made after the second has read it."""
    ops = {"first": "aten.addmm.default", "act": "aten.sigmoid.default"}
    regions = tuple(Region(name, 0) for name in words)
    return {"": PhaseTable(regions, tuple(Decision(ops[r.module], 0, r, words[r.module]) for r in regions))}


@pytest.mark.parametrize("words", [{"act": RECOMPUTE}, {"act": CACHE}, {"act": DISK}, {"first": DISK, "act": RECOMPUTE}, {"first": DISK}])
def test_a_write_that_nobody_watches_is_refused_or_does_no_harm(words: dict[str, str]) -> None:
    step = made(STEPS["written_outside"])
    with apply_tables(step, watching(**words)):
        try:
            assert differences(plain_bits("written_outside"), bits_after(step)) == []
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return
    assert words.get("act") not in (RECOMPUTE, CACHE) or "first" in words  # these cannot be made again from what was written to


def handling() -> set[int]:
    """What the mechanism is made of, as far as it is alive; other tests' exceptions may hold some."""
    return {id(o) for o in gc.get_objects() if type(o).__name__ in ("Node", "Handle", "Spilled", "_Maker", "Kept")}


@pytest.mark.parametrize("words", [[RECOMPUTE], [CACHE], ["recompute twice"], [DISK]])
def test_nothing_stays_alive(words: list[str]) -> None:
    """What is to be freed is free once the loss is there, and all of it after backward."""
    held: list[weakref.ref[torch.UntypedStorage]] = []
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    step = Step(net, lambda m, x: m(x).pow(2).mean(), sgd(net), torch.randn(64, 64))
    decisions = tuple(Decision(op, n, None, words[0]) for op in ("aten.addmm.default", "aten.tanh.default") for n in range(2))
    for layer in list(net)[:4]:
        layer.register_forward_hook(lambda m, a, out: held.append(weakref.ref(out.untyped_storage())))
    with apply_tables(step, {"": PhaseTable((None,), decisions)}):
        gc.collect()
        before = handling()
        gc.disable()
        try:
            with step.running.surroundings(""):
                loss = step.loss(step.model, step.batch)  # type: ignore[misc]
            assert [storage() for storage in held] == [None] * 4
            loss.backward()
            del loss
            assert handling() <= before
        finally:
            gc.enable()


def test_a_module_the_step_does_not_have() -> None:
    decisions = (Decision("aten.tanh.default", 0, Region("decoder", 0), RECOMPUTE),)
    table = {"": PhaseTable((Region("0", 0), Region("decoder", 0)), decisions)}
    step = made(STEPS["dense"])
    before = furniture(step)
    with pytest.raises(CannotApply, match="inside the module 'decoder', which none of the step's models has") as error:
        apply_tables(step, table)
    assert "plan this step again" in str(error.value) and furniture(step) == before


def test_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    step = made(STEPS["residual"])
    with put_on("residual", step, spread("residual", [DISK])):
        step.run(step.batch)
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


class Decoder(nn.Sequential):
    """Only the loss holds it."""


def test_a_module_is_watched_by_itself_beside_a_stranger_whose_name_its_own_begins_with() -> None:
    net = nn.ModuleDict({"Decoder2": nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))})
    stranger = Decoder(nn.Linear(8, 8)).requires_grad_(False)
    step = Step(net, lambda m, x: stranger(m["Decoder2"](x)).pow(2).mean(), sgd(net), torch.randn(16, 8))
    trace = profile(step, simulate=True).trace
    assert trace is not None
    (tanh,) = (number for number, op in enumerate(trace.ops) if op.name == "aten.tanh.default")
    (inside,) = (number for number, op in enumerate(trace.ops) if op.module == "Decoder.0" and op.phase == "forward" and "mm" in op.name)
    assert make_tables(trace, {tanh: RECOMPUTE})[""].regions == (Region("Decoder2.1", 0),)
    assert make_tables(trace, {inside: RECOMPUTE})[""].regions == (None,)
