"""The CIFAR-10 recipe, run as a user would run it; its model, its data, and what the documented loop loses."""

from __future__ import annotations

import csv
import io
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.capture.loaders import loader_workers
from memfit.levers import LEVERS, CannotApply
from memfit.ops.random_samples import draws_random_numbers
from memfit.records import Option
from recipes.cifar10 import data, model, screen, train, training
from recipes.cifar10.curves import make_documented_step

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"


def _npz(directory: Path, count: int = 40) -> Path:
    made = data.synthetic(count, 20)
    directory.mkdir(exist_ok=True)
    x, x_test = (t.permute(0, 2, 3, 1).numpy() for t in (made.train, made.test))
    np.savez(directory / "small.npz", x_train=x, y_train=made.train_labels.numpy(), x_test=x_test, y_test=made.test_labels.numpy())
    return directory


def _run(*flags: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes/cifar10/train.py"), *map(str, flags)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})


# the model


def test_h2q_has_the_documented_number_of_parameters_within_one_percent() -> None:
    assert abs(model.parameter_count(model.make_model("h2q")) / 13_957_074 - 1) < 0.01
    assert model.parameter_count(model.make_model("h2q", depth=2)) < 0.6 * 13_957_074


def _hamilton(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product as books write it; components in the last dimension."""
    (r, i, j, k), (t, x, y, z) = a.unbind(-1), b.unbind(-1)
    return torch.stack(
        [r * t - i * x - j * y - k * z, r * x + i * t + j * z - k * y, r * y - i * z + j * t + k * x, r * z + i * y - j * x + k * t], -1
    )


@pytest.mark.parametrize("broken", [False, True])
def test_quaternion_layers_compute_the_hamilton_product(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        turned = list(model._PRODUCT)
        turned[1] = ((1, 1), (0, 1), (3, -1), (2, -1))
        monkeypatch.setattr(model, "_PRODUCT", tuple(turned))
    x = torch.randn(2, 4, 3, dtype=torch.float64)  # three quaternions, component after component
    dense = model.QuaternionLinear(12, 8).double()
    point = model.QuaternionConv2d(12, 8, size=1).double()
    point.weight.data = dense.weight.data.view(4, 3, 2).transpose(1, 2).reshape(4, 2, 3, 1, 1)
    weight = dense.weight.view(4, 3, 2).permute(1, 2, 0)
    expected = _hamilton(weight, x.transpose(1, 2).unsqueeze(2)).sum(1).transpose(1, 2).flatten(1)
    same = [torch.allclose(found, expected, rtol=1e-12) for found in (dense(x.flatten(1)), point(x.reshape(2, 12, 1, 1)).flatten(1))]
    assert same == [not broken] * 2


def test_neither_model_has_batch_norm_and_memfit_would_refuse_it() -> None:
    nets = [model.make_model("h2q", 1), model.make_model("baseline")]
    assert not any(isinstance(module, nn.BatchNorm2d) for net in nets for module in net.modules())
    mixed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10))
    batch = torch.randn(4, 3, 32, 32), torch.arange(4)
    mixed(batch[0])
    step = memfit.Step(mixed, training.class_loss, torch.optim.AdamW(mixed.parameters()), batch)
    with pytest.raises(CannotApply, match=r"BatchNorm2d.*statistics of the whole batch"):
        LEVERS["microbatch"].apply(step, _parts_of(2, 4))


# the data


def _batches(directory: Path, made: data.Images) -> Path:
    folder = directory / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, part in enumerate(torch.arange(len(made.train)).chunk(5), 1):
        _pickle(folder / f"data_batch_{number}", made.train[part], made.train_labels[part])
    _pickle(folder / "test_batch", made.test, made.test_labels)
    return folder


def _pickle(path: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    path.write_bytes(pickle.dumps({b"data": images.flatten(1).numpy(), b"labels": labels.tolist()}, protocol=2))


def test_the_three_forms_of_the_data_are_the_same_pictures(tmp_path: Path) -> None:
    made = data.synthetic(40, 20)
    folder = _batches(tmp_path / "folder", made)
    (tmp_path / "archive").mkdir()
    with tarfile.open(tmp_path / "archive" / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname="cifar-10-batches-py")
    forms = [tmp_path / "folder", folder, tmp_path / "archive", _npz(tmp_path / "npz")]
    forms += [tmp_path / "archive" / "cifar-10-python.tar.gz", next(forms[-1].glob("*.npz"))]
    for found in map(data.load, forms):
        assert torch.equal(found.train, made.train) and torch.equal(found.train_labels, made.train_labels)
        assert torch.equal(found.test, made.test) and torch.equal(found.test_labels, made.test_labels)


def test_data_that_is_not_there_or_not_data_is_told(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="is not a directory"):
        data.load(tmp_path / "nowhere")
    with pytest.raises(data.DataError, match=r"has no CIFAR-10: neither cifar-10-python.tar.gz"):
        data.load(tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"half a download")
    with pytest.raises(data.DataError, match="download it again"):
        data.load(tmp_path)
    np.savez(tmp_path / "others.npz", x=np.zeros(3))
    with pytest.raises(data.DataError, match="has no x_train, y_train, x_test, y_test"):
        data.load(tmp_path / "others.npz")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x_train": np.zeros((4, 32, 32, 3))}, "holds torch.float64"),
        ({"y_train": np.arange(4) + 0.5}, "with torch.float64 labels"),
        ({"y_train": np.array(list("abcd"))}, "cannot be read (TypeError"),
        ({"y_train": np.arange(3)}, "has 4 pictures with 3 labels"),
        ({"y_train": np.arange(4) - 1}, "and needs one of 0 to 9 for each"),
        ({"y_test": np.array([10])}, "and needs one of 0 to 9 for each"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros(0, int)}, "has 0 pictures with 0 labels"),
    ],
)
def test_data_of_another_kind_is_told(changed: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((4, 32, 32, 3), np.uint8), "y_train": np.arange(4)}
    arrays |= {"x_test": np.zeros((1, 32, 32, 3), np.uint8), "y_test": np.arange(1)}
    np.savez(tmp_path / "some.npz", **arrays | changed)  # type: ignore[arg-type]
    with pytest.raises(data.DataError) as told:
        data.load(tmp_path)
    assert words in str(told.value) and "some.npz" in str(told.value)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "some.npz").write_bytes(b"")
    with pytest.raises(data.DataError, match="cannot be read"):
        data.load(tmp_path)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    made = data.synthetic(40, 20)
    folder = _batches(tmp_path, made)
    (folder / "test_batch").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(data.DataError, match=r"it asks for posix\.getcwd"):
        data.load(tmp_path)


def test_samples_depend_on_the_epoch_and_on_nothing_else() -> None:
    made = data.synthetic(48, 20)

    def pictures(batch: int, workers: int, epoch: int) -> torch.Tensor:
        loader = data.train_loader(made, batch, workers)
        data.begin_epoch(loader, epoch)
        return torch.cat([x for x, _ in loader])

    assert torch.equal(pictures(32, 0, 1), pictures(16, 2, 1))
    assert not torch.equal(pictures(32, 0, 1), pictures(32, 0, 2))
    assert not draws_random_numbers(data.train_loader(made, 16).dataset)  # so memfit may take workers away, and nothing changes


def test_workers_count() -> None:
    workers = loader_workers(data.train_loader(data.synthetic(48, 20), 16, workers=2))
    assert workers.count == 2 and workers.bytes > 2 * 2**20 and not workers.draw


@pytest.mark.skipif(not (SHARED / "cifar10_12k.npz").exists(), reason="the 12,000 real pictures are not beside the repository")
def test_the_real_pictures_are_read() -> None:
    found = data.load(SHARED)
    assert found.train.shape == (10_000, 3, 32, 32) and found.test.shape == (2_000, 3, 32, 32)
    assert found.train_labels.bincount().tolist() == [1000] * 10


# what the documented loop loses, and memfit's does not


def _parts_of(size: int, batch: int) -> Option:
    return Option("microbatch", "", "reordered", {"size": size, "batch": batch, "draws": {}, "again": False})


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10)).double()


def _documented(batches: list[tuple[torch.Tensor, torch.Tensor]], steps: int, cleaning: bool = True) -> list[torch.Tensor]:
    net = _net()
    training.documented_epoch(net, batches, torch.optim.AdamW(net.parameters()), steps, lambda number, loss: None, cleaning)
    return list(net.parameters())


def _pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 32, 32, dtype=torch.float64), torch.arange(count) % 10


def test_the_documented_loop_throws_its_last_micro_batches_away() -> None:
    batches = [_pictures(2) for _ in range(5)]
    whole, without, more = _documented(batches, 2), _documented(batches[:4], 2), _documented([*batches, _pictures(2)], 2)
    assert all(map(torch.equal, whole, without))
    assert not all(map(torch.equal, more, without))


def test_the_documented_update_as_a_step_is_the_documented_loop_s() -> None:
    """Also on a batch of another size, as the largest batch is asked for."""
    step = make_documented_step("baseline")
    for size in (128, 64):
        x, y = torch.arange(size), torch.arange(size) % 10
        parts = list(step.running.parts("", (x, y)))
        assert [(len(part.batch[0]), part.share) for part in parts] == [(size // 8, 1 / 8)] * 8
        assert all(torch.equal(torch.cat([part.batch[n] for part in parts]), whole) for n, whole in enumerate((x, y)))


def test_cleaning_up_changes_no_bit() -> None:
    batches = [_pictures(2) for _ in range(4)]
    assert all(map(torch.equal, _documented(batches, 2), _documented(batches, 2, cleaning=False)))


@pytest.mark.parametrize("weighted", [True, False])
def test_memfits_parts_are_the_whole_batch_also_when_the_last_is_smaller(weighted: bool) -> None:
    batch = _pictures(12)
    plain, parts = ([net := _net(), memfit.Step(net, training.class_loss, torch.optim.AdamW(net.parameters()), batch)][1] for _ in range(2))
    if weighted:
        with LEVERS["microbatch"].apply(parts, _parts_of(5, 12)):
            losses = [(float(plain.run(b)[""]), float(parts.run(b)[""])) for b in (batch, _pictures(12), _pictures(7))]
    else:  # 5, 5 and 2, each counted a third
        net, total = parts.model, 0.0
        parts.optimizers[0].zero_grad()
        for start in (0, 5, 10):
            loss = training.class_loss(net, (batch[0][start : start + 5], batch[1][start : start + 5])) / 3
            loss.backward()
            total += loss.item()
        parts.optimizers[0].step()
        losses = [(float(plain.run(batch)[""]), total)]
    close = [torch.allclose(a, b, rtol=1e-7, atol=1e-9) for a, b in zip(plain.model.parameters(), parts.model.parameters(), strict=True)]
    assert (all(abs(a - b) < 1e-9 for a, b in losses) and all(close)) == weighted


# the program


def test_the_documented_command_prints_the_documented_lines(tmp_path: Path) -> None:
    flags = ["--epochs", 1, "--batch-size", 4, "--accumulation-steps", 3, "--model", "both", "--depth", 1, "--num-workers", 1]
    done = _run(*flags, "--data-dir", _npz(tmp_path / "images"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number = r"[\d.,]+"
    for line in (
        "H2Q CIFAR-10 Classification Benchmark \\(Memory Optimized\\)",
        "Batch size: 4\nGradient accumulation steps: 3\nEffective batch size: 12\nEpochs: 1",
        f"Initial memory: {number}MB",
        "Train batches: 10, Test batches: 1",
        f"Benchmarking: H2Q-Spacetime \\(Memory Optimized\\)\nParameters: {number}\nDevice: ",
        "Batch size: 4 × Accumulation: 3 = Effective 12",
        f"  Step 10/10 \\| Loss: {number} \\| Mem: {number}MB\n",
        f"  Train Loss: {number} \\| Test Acc: {number}% \\| Test Loss: {number} \\| Memory: {number}MB",
        r"Model +Accuracy +Params +Time\(s\) +Memory\(MB\)",
        f"H2Q-Spacetime +{number}% +{number} +{number} +{number}\nBaseline-CNN +{number}% +288,746 +{number} +{number}\n",
        f"Memory Statistics:\n  Initial: {number}MB\n  Current: {number}MB \\(Python objects\\)\n  Peak: {number}MB \\(Python objects\\)",
        f"  Final system: {number}MB",
    ):
        assert re.search(line, done.stdout), (line, done.stdout)
    folder = tmp_path / "runs/cifar10/h2q"
    rows = list(csv.DictReader(io.StringIO((folder / "log.csv").read_text())))
    assert [row["epoch"] for row in rows] == ["1"] and float(rows[0]["memory_bytes"]) > 10**8
    assert (folder / "last.pt").exists() and (folder / "mistakes.png").exists()


def test_a_budget_gives_the_same_training(tmp_path: Path) -> None:
    common = ["--epochs", 1, "--model", "baseline", "--data-dir", _npz(tmp_path / "images", 96)]
    fitted = _run(*common, "--budget", "620MiB", "--batch-size", 16, "--accumulation-steps", 6, "--output-dir", "fitted", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert "memfit: " in fitted.stdout and "proven" in fitted.stdout
    plain = _run(*common, "--batch-size", 96, "--accumulation-steps", 1, "--output-dir", "plain", cwd=tmp_path)
    losses = [re.findall(r"Train Loss: ([\d.]+).*Test Loss: ([\d.]+)", run.stdout)[0] for run in (fitted, plain)]
    assert np.allclose(*[np.array(loss, float) for loss in losses], atol=2e-4), losses


def test_resume_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--epochs",
        "2",
        "--model",
        "baseline",
        "--batch-size",
        "10",
        "--accumulation-steps",
        "2",
        "--data-dir",
        str(_npz(tmp_path / "images")),
    ]
    assert train.main([*flags, "--output-dir", str(tmp_path / "whole")]) == 0
    finish = train.Training._finish

    def interrupted(self: train.Training, *values: object) -> None:
        finish(self, *values)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train.Training, "_finish", interrupted)
        assert train.main([*flags, "--output-dir", str(tmp_path / "parts")]) == 130
    assert "--resume goes on" in capsys.readouterr().err
    first = torch.load(tmp_path / "parts/baseline/last.pt", weights_only=True)
    assert train.main([*flags, "--output-dir", str(tmp_path / "parts"), "--resume"]) == 0
    assert "Resumed after epoch 1" in capsys.readouterr().out
    whole, parts = (torch.load(tmp_path / run / "baseline/last.pt", weights_only=True) for run in ("whole", "parts"))
    assert all(torch.equal(whole["model"][name], value) for name, value in parts["model"].items())
    assert not torch.equal(whole["model"]["0.weight"], first["model"]["0.weight"])
    assert len((tmp_path / "parts/baseline/log.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "where are the pictures? Give --data-dir DIR with CIFAR-10 in it, or --data synthetic."),
        (["--data", "synthetic", "--lr", "-1"], "argument --lr: -1 is not a number above 0"),
        (["--data", "synthetic", "--epochs", "0"], "argument --epochs: 0 is not a whole number from 1 up"),
        (["--data", "synthetic", "--batch-size", "-3"], "argument --batch-size: -3 is not a whole number from 1 up"),
        (["--data", "synthetic", "--accumulation-steps", "0"], "argument --accumulation-steps: 0 is not a whole number from 1 up"),
        (["--data", "synthetic", "--depth", "1e3"], "argument --depth: 1e3 is not a whole number from 1 up"),
        (["--data", "synthetic", "--num-workers", "-1"], "argument --num-workers: -1 is not a whole number from 0 up"),
        (["--data", "synthetic", "--allow", "all"], "argument --allow: invalid choice: 'all'"),
        (["--data", "synthetic", "--model", "h3q"], "invalid choice: 'h3q'"),
        (
            ["--data", "synthetic", "--resume", "--output-dir", "nowhere"],
            "there is nothing to resume: nowhere has no checkpoint of h2q or baseline",
        ),
    ],
)
def test_wrong_flags_are_told(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.arguments(flags)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_directory_and_a_wrong_budget_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--data-dir", str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert train.main(["--data", "synthetic", "--model", "baseline", "--budget", "lots", "--output-dir", str(tmp_path)]) == 2
    assert "lots" in capsys.readouterr().err


def test_an_update_larger_than_the_data_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "synthetic", "--model", "baseline", "--output-dir", str(tmp_path)]
    assert train.main([*flags, "--batch-size", "600", "--accumulation-steps", "2"]) == 2
    assert "and there are 1000: the documented loop would never make one" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline" / "last.pt").write_bytes(b"nonsense")
    with pytest.raises(SystemExit) as ended:
        train.main(["--data", "synthetic", "--model", "baseline", "--output-dir", str(tmp_path), "--resume"])
    assert ended.value.code == 2 and "last.pt cannot be read: it is damaged" in capsys.readouterr().err


def test_a_machine_that_swaps_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for grown, noticed in ((5_000_000, True), (0, False)):
        readings = iter([7_000_000, 7_000_000 + grown])
        monkeypatch.setattr(training, "swapped_bytes", lambda readings=readings: next(readings))
        with training.Watch() as watch:
            pass
        screen.epoch_ends(1.0, 0.5, 1.0, watch)
        assert ("this machine swaps. 5.0MB" in capsys.readouterr().out) == noticed


@pytest.mark.parametrize(("epochs", "rate"), [(6, None), (3, 0.2), (3, None)])
def test_a_run_that_goes_on_for_longer_follows_the_longer_cosine(epochs: int, rate: float | None) -> None:
    def schedule() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.CosineAnnealingLR]:
        optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), rate or 0.1)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    before, begun = torch.optim.AdamW(nn.Linear(1, 1).parameters(), 0.1), 3
    first = torch.optim.lr_scheduler.CosineAnnealingLR(before, begun)
    (whole, uninterrupted), (after, resumed) = schedule(), schedule()
    for each in (first, uninterrupted):
        for _ in range(begun - 1):
            each.optimizer.step()
            each.step()
    after.load_state_dict(before.state_dict())
    resumed.load_state_dict(first.state_dict())

    told = training.follow_cosine(resumed, epochs, rate)

    for _ in range(begun - 1, epochs):
        assert after.param_groups[0]["lr"] == pytest.approx(whole.param_groups[0]["lr"], abs=1e-12)
        for optimizer, each in ((after, resumed), (whole, uninterrupted)):
            optimizer.step()
            each.step()
    assert (told == "") == ((epochs, rate) == (3, None))
    assert not told or told.startswith(f"The run was begun with 3 epochs from 0.1: from here on its rate follows the cosine of {epochs}")


def test_memory_that_runs_out_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def without_memory() -> data.Images:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(data, "synthetic", without_memory)
    assert train.main(["--data", "synthetic"]) == 2
    assert capsys.readouterr().err.startswith("Memory ran out: give a --budget below what is free")


@pytest.mark.parametrize("structured", [True, False])
def test_the_loss_falls_on_pictures_made_here(structured: bool) -> None:
    net, images = model.make_model("baseline"), data.synthetic()
    if not structured:
        images.train_labels.copy_(images.train_labels[torch.randperm(1000)])
    totals = [0.0]
    loader = data.train_loader(images, 50)
    training.documented_epoch(net, loader, torch.optim.AdamW(net.parameters(), 1e-3), 1, lambda number, loss: totals.append(number * loss))
    assert (totals[20] - totals[15] < 0.9 * totals[5]) == structured
