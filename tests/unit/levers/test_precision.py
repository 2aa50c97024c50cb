"""precision: halved where autocast halves, skipped and explained where it is not finite, and taken off again."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
import quick_ledgers
from memfit import Phase, Step
from memfit.capture import capture
from memfit.ledger import account
from memfit.levers import CannotApply
from memfit.levers.precision import Precision
from memfit.levers.precision_running import FiniteGuard, autocast_in_modules
from memfit.records import Ledger, Option
from memfit.step.running import Part
from small_steps import SMALL_STEPS, convolutional_2d, dense, in_place_ops, mixed_precision

LEVER = Precision()


def option(ledger: Ledger, dtype: str = "bfloat16") -> Option:
    return next(o for o in LEVER.options(ledger) if o.settings["dtype"] == dtype)


def wide_dense() -> Step:
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))
    return Step(net, lambda model, x: model(x).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2048, 64))


def encoder_and_decoder() -> Step:
    nets = {"encoder": nn.Sequential(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 64)), "decoder": nn.Linear(64, 32)}

    def loss(models: Any, x: torch.Tensor, carry: Any) -> torch.Tensor:
        latent = models["encoder"](x)
        return F.mse_loss(models["decoder"](latent), x) + 0.1 * latent.exp().mean()

    weights = [p for net in nets.values() for p in net.parameters()]
    return Step(nets, phases=[Phase("", loss, torch.optim.Adam(weights))], batch=torch.randn(1024, 32))


STEPS = {make.__name__: make for make in (wide_dense, encoder_and_decoder)} | SMALL_STEPS
CASES = [(name, "bfloat16") for name in STEPS if name != "mixed_precision"] + [("convolutional_2d", "float16")]


def measured_in_half(step: Step) -> Ledger:
    """As a plan looks at a step for which rounding is allowed."""
    return account(capture(step, simulate=True, half=("bfloat16", "float16")))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=" ".join)
def test_the_rewrite_is_what_a_fresh_capture_sees(name: str, dtype: str) -> None:
    step = STEPS[name]()
    before = measured_in_half(step)
    told = LEVER.rewrite(before, option(before, dtype))
    with LEVER.apply(step, option(before, dtype)):
        seen = memfit.profile(step, simulate=True)
    assert without_workspaces(told) == pytest.approx(without_workspaces(seen), rel=0.015)
    assert told.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.02)
    assert told.low_bytes <= seen.peak_bytes <= told.high_bytes


def test_gradients_are_cast_back_in_autograd_s_order() -> None:
    """The weight's, then the bias's: to the byte, where kernels take nothing inside."""
    step = in_place_ops()
    before = quick_ledgers.seen(step)
    with LEVER.apply(step, option(before)):
        assert without_workspaces(LEVER.rewrite(before, option(before))) == quick_ledgers.seen(step).peak_bytes


def test_what_kernels_take_in_half_precision_follows_no_rule() -> None:
    """Why it is measured: without that, a convolution's peak is missed, and the interval says so."""
    step = convolutional_2d()
    before = memfit.profile(step, simulate=True)
    told = LEVER.rewrite(before, option(before))
    with LEVER.apply(step, option(before)):
        seen = memfit.profile(step, simulate=True)
    assert told.peak_bytes != pytest.approx(seen.peak_bytes, rel=0.02)
    assert told.low_bytes <= seen.peak_bytes <= told.high_bytes


def without_workspaces(ledger: Ledger) -> int:
    assert ledger.trace is not None
    ops = tuple(dataclasses.replace(op, workspace=0) for op in ledger.trace.ops)
    return account(dataclasses.replace(ledger.trace, ops=ops)).peak_bytes


def test_the_law_can_fail() -> None:
    """Halving every activation, as a rule of thumb has it, is not what happens."""
    step = wide_dense()
    before = memfit.profile(step, simulate=True)
    with LEVER.apply(step, option(before)):
        seen = memfit.profile(step, simulate=True)
    halved = before.peak_bytes - before.by_category["activations"] // 2
    assert halved != pytest.approx(seen.peak_bytes, rel=0.02)


def test_nothing_is_offered_where_all_is_in_half_already() -> None:
    assert LEVER.options(memfit.profile(mixed_precision(), simulate=True)) == []


def test_options_say_what_stays_in_float32_and_what_is_slow() -> None:
    bfloat16, float16 = LEVER.options(memfit.profile(dense(), simulate=True))
    assert bfloat16.exactness == float16.exactness == "rounded"
    assert "norms' weights and statistics" in bfloat16.settings["kept_in_float32"]
    assert "many times slower than float32" in float16.why and "two to four times slower than float32" in bfloat16.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_autocast_s_own(dtype: torch.dtype) -> None:
    step = convolutional_2d()
    twin = copy.deepcopy(step.model)
    with LEVER.apply(step, Option("precision", "", "rounded", {"dtype": str(dtype).removeprefix("torch.")})):
        step.run(step.batch)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    with torch.autocast("cpu", dtype):
        out = twin(step.batch["image"])  # type: ignore[operator]
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)  # type: ignore[union-attr]
    scaler.scale(F.cross_entropy(out.float(), step.batch["label"])).backward()
    scaler.unscale_(optimizer)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(step.model.parameters(), twin.parameters(), strict=True))  # type: ignore
    assert all(torch.equal(a, b) for a, b in zip(step.model.buffers(), twin.buffers(), strict=True))  # type: ignore[union-attr]


def test_a_loss_keeps_all_bits_outside_of_modules() -> None:
    seen = []
    net = nn.Linear(4, 4)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        seen.extend([out.dtype, out.exp().dtype])
        return out.exp().mean()

    step = Step(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 4))
    with LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"})):
        step.run(step.batch)
    assert set(seen) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):  # the broken twin: autocast around everything
        loss(net, torch.randn(2, 4))
    assert torch.bfloat16 in seen


@dataclasses.dataclass(frozen=True)
class Out:
    latent: torch.Tensor
    more: Any
    words: str = "kept"
    sizes: torch.Tensor = dataclasses.field(init=False, default_factory=lambda: torch.zeros(2, dtype=torch.bfloat16))


class GivesRecords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.given = nn.Linear(4, 4), []

    def forward(self, x: torch.Tensor) -> list[Out]:
        latent = self.inner(x)
        self.given = [Out(latent, {"inside": Out(latent * 2, None)}), Out(x, x.argmax(-1))]
        return self.given


def test_records_that_a_module_gives_are_handed_out_in_float32() -> None:
    net = GivesRecords()
    with autocast_in_modules("cpu", torch.bfloat16):
        first, second = net(torch.ones(2, 4))
    inside = first.more["inside"]
    assert {t.dtype for out in (first, inside, second) for t in (out.latent, out.sizes)} == {torch.float32}
    assert (type(first), first.words, inside.more, second.more.dtype) == (Out, "kept", None, torch.int64)
    assert net.given[0].latent.dtype is torch.bfloat16  # what the module keeps for itself stays as it is
    F.mse_loss(inside.latent, torch.ones(2, 4)).backward()
    assert net.inner.weight.grad is not None


def test_outputs_of_transformers_keep_their_kind() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Gives(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=super().forward(x))

    with autocast_in_modules("cpu", torch.bfloat16):
        out = Gives(4, 4)(torch.ones(2, 4))
    assert type(out) is outputs.BaseModelOutput
    assert out.last_hidden_state.dtype is out[0].dtype is out["last_hidden_state"].dtype is torch.float32


class Explodes(nn.Module):
    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.0 if self.on else x


def exploding(**given: Any) -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Explodes(), nn.Linear(8, 1))
    return Step(net, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(net.parameters(), 0.1), torch.randn(8, 4), **given)


def state_of(step: Step) -> list[torch.Tensor]:
    net = step.models[""]
    states = [t for o in step.optimizers for state in o.state.values() for t in state.values()]
    return [t.clone() for t in (*net.parameters(), *net.buffers(), *states)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_that_is_not_finite_is_skipped_and_explained(dtype: str) -> None:
    step = exploding()
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": dtype}))
    step.run(step.batch)
    before, bad = state_of(step), step.models[""][3]
    bad.on = True
    random_after = _random_state_after_one_forward(step)
    with pytest.warns(UserWarning, match=r"first appears in the output of 3 \(Explodes\)") as told:
        step.run(step.batch)
    assert "step is skipped" in str(told[0].message) and ("loss scale" in str(told[0].message)) == (dtype == "float16")
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(step), strict=True))
    assert torch.equal(torch.get_rng_state(), random_after)  # looking for the module drew no random numbers
    bad.on = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.run(step.batch)
    assert not all(torch.equal(a, b) for a, b in zip(before, state_of(step), strict=True))


def _random_state_after_one_forward(step: Step) -> torch.Tensor:
    """Dropout draws as many numbers in bits as in any precision: run it once, and put everything back."""
    model, before = copy.deepcopy(step.models[""]), torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", step.running.guard._dtype):  # type: ignore[union-attr]
        model(step.batch)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    return after


class Counts(nn.Module):
    """Keeps account in every way there is: in place, in place behind autograd's back, by assignment, and in plain Python."""

    def __init__(self, codes: int = 8) -> None:
        super().__init__()
        self.codes, self.calls, self.draws = nn.Linear(4, codes, bias=False), 0, (0.0, 0.0)
        for name, dtype in (("usage", torch.long), ("seen", torch.bool), ("total", torch.float32), ("average", torch.float32)):
            self.register_buffer(name, torch.zeros(codes, dtype=dtype))
        self.register_buffer("positions", torch.arange(4).expand(3, 4))  # nothing can be written to it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.codes(x)
        chosen = out.argmax(-1)
        self.usage.scatter_add_(0, chosen, torch.ones_like(chosen))
        self.seen[chosen] = True
        self.total.data.add_(out.detach()[0])
        self.average = 0.9 * self.average + out.detach()[0]
        self.calls, self.draws = self.calls + 1, (random.random(), np.random.rand())
        return out


def test_a_skipped_step_leaves_counts_and_averages_as_they_were_and_draws_once() -> None:
    net = Counts()
    step = Step(net, lambda m, x: m(x).mean() * torch.inf, torch.optim.SGD(net.parameters(), 0.1), torch.randn(6, 4))
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"}))
    before, objects = {name: b.clone() for name, b in net.named_buffers()}, dict(net.named_buffers())
    random.seed(3), np.random.seed(3)
    drawn, following = [(random.random(), np.random.rand()) for _ in range(2)]
    random.seed(3), np.random.seed(3)
    with pytest.warns(UserWarning, match="appeared in backward"):
        step.run(step.batch)
    assert all(b is objects[name] and torch.equal(b, before[name]) for name, b in net.named_buffers())
    assert (random.random(), np.random.rand()) == following
    assert (net.calls, net.draws) == (1, drawn)  # looking for the module has not been counted


def test_copies_of_counts_are_foretold() -> None:
    net = Counts(5000)
    step = Step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.randn(2, 4))
    before = measured_in_half(step)
    told = LEVER.rewrite(before, option(before))
    with LEVER.apply(step, option(before)):
        assert told.peak_bytes == pytest.approx(memfit.profile(step, simulate=True).peak_bytes, rel=0.02)


def test_a_guard_that_forgets_buffers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FiniteGuard, "_put_back", lambda self, run: None)
    step = exploding()
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"}))
    step.models[""][3].on = True
    before = state_of(step)
    with pytest.warns(UserWarning):
        step.run(step.batch)
    assert not all(torch.equal(a, b) for a, b in zip(before, state_of(step), strict=True))


def test_an_infinity_that_appears_in_backward_is_told() -> None:
    net = nn.Linear(1, 1)
    step = Step(net, lambda m, x: (m(x) * 0.0).abs().sqrt().mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(2, 1))
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"}))
    with pytest.warns(UserWarning, match="appeared in backward; the gradient of bias"):
        step.run(step.batch)


def test_a_batch_that_is_not_finite_itself_blames_no_module() -> None:
    step = exploding()
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"}))
    with pytest.warns(UserWarning, match="it is already in the batch, or in what the phase before left in carry"):
        step.run(torch.full((8, 4), float("nan")))


def test_parts_are_scaled_alike_and_brought_back_once() -> None:
    """Two micro-batches in float16 with clipping: the gradients of one batch, up to rounding."""
    torch.manual_seed(0)
    step, plain = (exploding(clip_grad_norm=0.1) for _ in range(2))
    for s in (step, plain):
        s.models[""][1], s.models[""][2] = nn.Identity(), nn.Identity()
    plain.models[""].load_state_dict(step.models[""].state_dict())
    plain.run(step.batch)
    step.running.split = lambda phase, batch: [Part(half, 0.5) for half in batch.chunk(2)]
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "float16"}))
    step.run(step.batch)
    for a, b in zip(step.models[""].parameters(), plain.models[""].parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-3)


def test_a_simulation_leaves_the_real_scale_alone() -> None:
    step = dense()
    LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "float16"}))
    memfit.profile(step, simulate=True)
    step.run(step.batch)
    assert all(p.grad is not None and type(p.grad) is torch.Tensor for p in step.models[""].parameters())


def test_undo_takes_everything_off_also_after_an_exception() -> None:
    step = dense()
    undo = LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "bfloat16"}))
    with pytest.raises(ZeroDivisionError):
        Step(step.model, lambda m, x: m(x).mean() / (1 // 0), step.optimizer, step.batch, running=step.running).run(step.batch)
    assert not torch.is_autocast_enabled("cpu")
    undo()
    undo()
    assert (step.running.around_loss, step.running.guard) == ([], None)
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks
    assert next(iter(step.run(step.batch).values())).dtype is torch.float32


def test_a_module_that_fails_leaves_autocast() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), autocast_in_modules("cpu", torch.bfloat16):
        net(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("case", ["twice", "in_backward", "half_weights"])
def test_where_it_cannot_act_it_says_why(case: str) -> None:
    step, chosen = dense(), Option("precision", "", "rounded", {"dtype": "float16"})
    if case == "twice":
        LEVER.apply(step, chosen)
    elif case == "in_backward":
        step.running.steps_in_backward.append(step.optimizers[0])
    else:
        step.models[""].half()
    words = {
        "twice": "already applied",
        "in_backward": "a bad step could not be skipped",
        "half_weights": r"'0.weight' is already in half precision.*Leave out",
    }
    with pytest.raises(CannotApply, match=words[case]):
        LEVER.apply(step, chosen)


def test_a_resumed_training_goes_on_at_its_scale() -> None:
    guards = []
    for bad in (True, False):
        step = exploding()
        LEVER.apply(step, Option("precision", "", "rounded", {"dtype": "float16"}))
        step.models[""][3].on = bad
        guards.append(step.running.guard)
        if bad:
            with pytest.warns(UserWarning, match="The loss scale is now 32768"):
                step.run(step.batch)
    first, second = guards
    assert first is not None and second is not None and first.state_dict() != second.state_dict()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict() == second.state_dict()
    second.begins("", 0, step.batch, {})
    assert float(second.scaled(torch.ones(()))) == 32768.0
