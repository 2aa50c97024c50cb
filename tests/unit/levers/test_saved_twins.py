"""saved: the mechanism with one of its cares left out. Each such twin must be seen to fail the comparison that the real one passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lever_law import made
from memfit.levers.saved import apply
from memfit.levers.saved.forward import Forward
from memfit.levers.saved.table import CACHE, RECOMPUTE
from memfit.ops.remaking import Kept, Node
from saved_steps import STEPS, put_on, spread, unlike


class Redrawing(Forward):
    """Draws a dropout's mask again instead of packing it."""

    def _run_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "bernoulli_" in str(func):
            node = self._node(torch.ops.aten.bernoulli.p, (args[0], *args[1:]), kwargs, 0)
            out = func(*args, **kwargs)
            self._note(args[0], node, 0, RECOMPUTE, False, writes=1)
            return out
        return super()._run_in_place(func, args, kwargs)


class Forgetful(Forward):
    """Takes what was made before an in-place op for what is there after it."""

    def _run_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        maker = self._makers.get(id(args[0].untyped_storage()))
        out = func(*args, **kwargs)
        if maker is not None:
            self._makers[id(args[0].untyped_storage())] = maker._replace(version=maker.version + 1)
        return out


class Restless(Forward):
    """Lets a batch norm that is made again update its running statistics again."""

    def _node(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], times: int) -> Node:
        node = super()._node(func, args, kwargs, times)
        if "batch_norm" in str(func):
            node.args[3:5] = [self._keep(args[3]), self._keep(args[4])]
        return node


@pytest.mark.parametrize(
    ("twin", "name", "word"),
    [(Redrawing, "called_twice", RECOMPUTE), (Redrawing, "transformer", RECOMPUTE), (Forgetful, "residual", RECOMPUTE),
     (Forgetful, "convolutional_2d", CACHE), (Restless, "residual", RECOMPUTE)],
)  # fmt: skip
def test_a_care_left_out_is_seen(twin: type[Forward], name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlike(name, spread(name, [word])) == []
    monkeypatch.setattr(apply, "Forward", twin)
    try:
        assert unlike(name, spread(name, [word]))
    except RuntimeError as error:  # torch itself may notice
        assert "inplace" in str(error)


def test_versions_that_nobody_looks_at_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one raises when a parameter has changed before backward: test_saved_life.py."""
    monkeypatch.setattr(Kept, "get", lambda self: self.tensor)
    step, plain = made(STEPS["dense"]), made(STEPS["dense"])
    with put_on("dense", step, spread("dense", [RECOMPUTE])):
        with step.running.surroundings(""):
            loss = step.loss(step.model, step.batch)  # type: ignore[misc]
        with torch.no_grad():
            step.models[""].get_parameter("0.weight").add_(1.0)
        loss.backward()
    plain.loss(plain.model, plain.batch).backward()  # type: ignore[misc]
    pairs = zip(step.models[""].parameters(), plain.models[""].parameters(), strict=True)
    assert not all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def test_copies_that_nobody_waits_for_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory written to while it is on its way to disk: refused at the latest when it is read."""
    ops = spread("written_outside", ["disk", RECOMPUTE])
    assert unlike("written_outside", ops) == []
    monkeypatch.setattr(Forward, "_wait_for_copies", lambda self, tensor: None)
    monkeypatch.setattr("memfit.ops.spill.Spill._write", _late(), raising=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unlike("written_outside", ops)


def _late() -> Any:
    import time

    from memfit.ops.spill import Spill

    write = Spill._write

    def later(self: Spill, *args: Any) -> None:
        time.sleep(0.05)
        write(self, *args)

    return later
