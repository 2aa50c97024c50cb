"""A recipe's checkpoint: what is in it, and what becomes of one that is damaged, or another run's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.levers import LEVERS
from memfit.records import Option
from recipes.kit.budget import Original
from recipes.kit.finite import Finite, NothingLearnt
from recipes.kit.run_folder import RunFolder


def _step(in_half: bool) -> memfit.Step:
    net = nn.Linear(4, 2)
    step = memfit.Step(net, lambda model, batch: model(batch).pow(2).mean(), torch.optim.SGD(net.parameters(), 0.1), torch.ones(3, 4))
    if in_half:
        LEVERS["precision"].apply(step, Option("precision", "float16 autocast", "rounded", {"dtype": "float16"}))
    return step


def _folder(path: Path, step: memfit.Step, resume: bool) -> RunFolder:
    return RunFolder(path, {"model": step.models[""], "optimizer": step.optimizers[0]}, resume)


def _scale(call: Original) -> float:
    return float(call.state_dict()["guard"]["scales"][""]["scale"])


def _saved(path: Path, in_half: bool, with_call: bool = True) -> Original:
    """One step that overflows in half precision, so that its scale is not the first one any more."""
    step = _step(in_half)
    call, folder = Original(step), _folder(path, step, resume=False)
    if with_call:
        folder.add("fitted", call)
    call(torch.ones(3, 4))
    if in_half:
        with pytest.warns(UserWarning, match="A NaN or an infinity"):
            call(torch.full((3, 4), 1e30))
    folder.save(1)
    return call


def _resumed(path: Path, in_half: bool) -> Original:
    step = _step(in_half)
    call, folder = Original(step), _folder(path, step, resume=True)
    assert folder.resume() == 1
    folder.add("fitted", call)
    return call


def test_the_scale_of_float16_losses_goes_on(tmp_path: Path) -> None:
    before = _saved(tmp_path, in_half=True)
    assert _scale(before) == 2**15
    assert _resumed(tmp_path, in_half=True).state_dict() == before.state_dict()


@pytest.mark.parametrize(("was", "now"), [(True, False), (False, True), (False, False)])
def test_a_run_that_is_fitted_in_another_way_begins_without_the_scale(was: bool, now: bool, tmp_path: Path) -> None:
    _saved(tmp_path, in_half=was)
    call = _resumed(tmp_path, in_half=now)
    call(torch.ones(3, 4))
    assert not now or _scale(call) == 2**16


def test_a_checkpoint_made_without_it_resumes(tmp_path: Path) -> None:
    _saved(tmp_path, in_half=False, with_call=False)
    assert _resumed(tmp_path, in_half=False).state_dict() == {}


def _another(path: Path) -> None:
    torch.save([1, 2], path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _larger(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save(state | {"model": nn.Linear(5, 2).state_dict()}, path)


def _two_groups(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save(state | {"optimizer": {"state": {}, "param_groups": []}}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "There is nothing to resume"),
        (lambda path: path.write_bytes(b""), "cannot be read: it is damaged, or no checkpoint"),
        (lambda path: path.write_bytes(b"nonsense"), "cannot be read: it is damaged, or no checkpoint"),
        (_cut, "cannot be read: it is damaged, or no checkpoint"),
        (_another, "has no epoch, random, model, optimizer: it was saved by another kind of run"),
        (_larger, "was saved by a run with other flags; its model does not fit this one: Error(s) in loading state_dict for Linear"),
        (_two_groups, "its optimizer does not fit this one: loaded state dict has a different number of parameter groups"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_one_message(
    damage: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path, in_half=False)
    damage(tmp_path / "last.pt")  # type: ignore[operator]
    with pytest.raises(SystemExit) as ended:
        _resumed(tmp_path, in_half=False)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and words in told and "last.pt" in told and len(told.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(SystemExit) as ended:
            _folder(path, _step(in_half=False), resume=False)
        assert ended.value.code == 2 and "name another --output-dir" in capsys.readouterr().err


def _rows(folder: Path) -> list[str]:
    return (folder / "log.csv").read_text().splitlines()


def test_a_resumed_run_goes_on_with_the_log_of_its_checkpoint(tmp_path: Path) -> None:
    """Steps after the checkpoint are made again, and would be there twice."""
    step = _step(in_half=False)
    folder = _folder(tmp_path, step, resume=False)
    folder.log(step=0, loss=3.0)
    folder.save(1)
    folder.log(step=1, loss=2.0)
    again = _folder(tmp_path, step, resume=True)
    assert again.resume() == 1 and _rows(tmp_path) == ["step,loss", "0,3.0", "1,2.0"]  # until there is something to say
    again.log(step=1, loss=2.5)
    again.save(2)
    assert _rows(tmp_path) == ["step,loss", "0,3.0", "1,2.5"]
    once_more = _folder(tmp_path, step, resume=True)
    once_more.resume()
    once_more.log(step=2, loss=1.0)
    assert _rows(tmp_path) == ["step,loss", "0,3.0", "1,2.5", "2,1.0"]


def test_a_run_that_never_began_leaves_the_old_log(tmp_path: Path) -> None:
    """A budget may be refused after the folder is opened."""
    step = _step(in_half=False)
    _folder(tmp_path, step, resume=False).log(step=0, loss=3.0)
    another = _folder(tmp_path, step, resume=False)
    assert _rows(tmp_path) == ["step,loss", "0,3.0"]
    another.log(epoch=1)
    assert _rows(tmp_path) == ["epoch", "1"]


def test_a_learning_rate_that_is_given_goes_before_the_saved_one(tmp_path: Path) -> None:
    _saved(tmp_path, in_half=False)
    for given, then in ((None, 0.1), (0.7, 0.7)):
        step = _step(in_half=False)
        _folder(tmp_path, step, resume=True).resume(given)
        assert step.optimizers[0].param_groups[0]["lr"] == then


def test_a_training_that_came_to_nothing_is_no_success() -> None:
    step = _step(in_half=True)  # a loss scale may skip steps until it suits
    finite = Finite(step)
    with pytest.warns(UserWarning, match="A NaN or an infinity"):
        step.run(torch.full((3, 4), 1e30))
    finite.check("epoch 1", float("nan"), steps=1)
    with pytest.raises(NothingLearnt, match="The loss of epoch 2 is inf: what it was trained to is not saved"):
        finite.check("epoch 2", float("inf"), steps=1)

    step = _step(in_half=False)
    LEVERS["precision"].apply(step, Option("precision", "bfloat16 autocast", "rounded", {"dtype": "bfloat16"}))
    finite = Finite(step)
    for bad in (True, False):
        with pytest.warns(UserWarning, match="A NaN or an infinity") if bad else nullcontext():
            step.run(torch.full((3, 4), float("inf") if bad else 1.0))
    finite.check("epoch 1", float("nan"), steps=2)
    with pytest.warns(UserWarning, match="A NaN or an infinity"):
        step.run(torch.full((3, 4), float("inf")))
    with pytest.raises(NothingLearnt, match="Not one of the 1 steps of epoch 2 could be taken"):
        finite.check("epoch 2", 1.0, steps=1)
