"""conditional_unet as a user runs it, and the exactness of its factored condition."""

from __future__ import annotations

import csv
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.levers import LEVERS
from memfit.ops.outer_product import FactoredContext
from recipes.conditional_unet import data, steps
from recipes.conditional_unet.conditioning import METHODS, PRESETS, ConditionProduct, OptimizationConfig
from recipes.conditional_unet.diffusion import sample, validation_loss
from recipes.conditional_unet.exactness import SMALL, difference
from recipes.conditional_unet.model import ConditionalUNet, Sizes

ENTRY = Path(__file__).parents[2] / "recipes" / "conditional_unet" / "train.py"
REAL = Path(__file__).parents[3] / "shared" / "data" / "cifar10_12k.npz"
TINY = [
    "--data",
    "synthetic",
    "--samples",
    "40",
    "--image-size",
    "8",
    "--model-channels",
    "32",
    "--batch-size",
    "12",
    "--sample-steps",
    "2",
]
TINY_SIZES: dict[str, Any] = {"image_size": 8, "model_channels": 32, "attention_resolutions": (4,)}


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ENTRY, *map(str, flags)], capture_output=True, text=True, cwd="/", timeout=120)


def losses(folder: Path) -> list[tuple[str, str]]:
    with (folder / "log.csv").open() as file:
        return [(row["loss"], row["validation"]) for row in csv.DictReader(file)]


def test_a_run_and_its_resumption(tmp_path: Path) -> None:
    whole = run(*TINY, "--epochs", 2, "--output-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "40 pictures of 10 classes, optimization_method none" in whole.stdout and "epoch 2/2: loss" in whole.stdout
    assert Image.open(tmp_path / "whole" / "samples.png").size == (4 * 66, 11 * 66)  # a row for each class, and one for none
    for flags in (["--epochs", 1], ["--epochs", 2, "--resume"]):
        assert run(*TINY, *flags, "--output-dir", tmp_path / "halves").returncode == 0
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    ended, halves = (torch.load(tmp_path / name / "last.pt", weights_only=True)["model"] for name in ("whole", "halves"))
    assert all(torch.equal(ended[key], halves[key]) for key in ended)


def test_a_run_inside_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, so that the budget is known to be tight for it."""
    from recipes.conditional_unet.train import main

    flags = [*TINY, "--image-size", "16", "--batch-size", "24", "--epochs", "1", "--sample-steps", "0"]
    main([*flags, "--output-dir", str(tmp_path / "plain")])
    step = built_without_memory(lambda: steps.step_of(24, image_size=16, model_channels=32, attention_resolutions=(8,)))
    plain = memfit.profile(step, simulate=True)
    budget = plain.process_high_bytes - plain.peak_bytes // 8
    main([*flags, "--output-dir", str(tmp_path / "fitted"), "--budget", f"{budget}B"])
    told = " ".join(capsys.readouterr().out.split())
    assert "memfit: " in told and ", proven" in told
    ((a, b),), ((c, d),) = losses(tmp_path / "plain"), losses(tmp_path / "fitted")
    assert float(a) == pytest.approx(float(c), rel=1e-4) and float(b) == pytest.approx(float(d), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "there is no data: give --data-dir DIR, or --data synthetic"),
        ([*TINY, "--lr", "-1"], "argument --lr: -1 is not a number above 0"),
        ([*TINY, "--epochs", "0"], "argument --epochs: 0 is not a whole number from 1 up"),
        ([*TINY, "--batch-size", "-3"], "argument --batch-size: -3 is not a whole number from 1 up"),
        ([*TINY, "--image-size", "-8"], "argument --image-size: -8 is not a whole number from 1 up"),
        ([*TINY, "--samples", "1"], "--samples must be at least 2: one to train on, one to judge by"),
        ([*TINY, "--sample-steps", "-1"], "argument --sample-steps: -1 is not a whole number from 0 up"),
        ([*TINY, "--sample-steps", "1001"], "--sample-steps must be at most 1000"),
        ([*TINY, "--guidance", "nan"], "--guidance must be a finite number"),
        ([*TINY, "--seed", str(2**64)], "--seed must be below 2 to the 64th"),
        ([*TINY, "--chunk_size", "0"], "chunk_size is 0, and must be at least 1"),
        ([*TINY, "--allow", "all"], "argument --allow: invalid choice: 'all'"),
        ([*TINY, "--resume"], "There is nothing to resume"),
        ([*TINY, "--optimization_method", "low_rank"], "the SVD of what the weights have become does not converge"),
        ([*TINY[:8], "--available", "lots"], "'lots' is not an amount of memory"),
        ([*TINY, "--threshold", "0"], "--threshold is the probability of dropping a class: above 0 and below 1"),
        ([*TINY, "--model-channels", "48"], "--model-channels must be a multiple of 32"),
        ([*TINY, "--low_rank_ratio", "2"], "low_rank_ratio is 2.0, and must be above 0 and at most 1"),
        ([*TINY, "--optimization_method", "magic"], "invalid choice: 'magic'"),
        (["--data-dir", "/nowhere"], "There is no /nowhere"),
        ([*TINY, "--budget", "some"], "'some' is not an amount of memory"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[-2:]),
)
def test_a_mistake_is_told_in_one_message(flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from recipes.conditional_unet.train import main

    with pytest.raises(SystemExit) as ended:
        main([*flags, "--output-dir", str(tmp_path)])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_memory_that_runs_out_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from recipes.conditional_unet import train

    def without_memory(count: int, size: int) -> data.Images:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(train, "synthetic", without_memory)
    with pytest.raises(SystemExit) as ended:
        train.main([*TINY, "--output-dir", str(tmp_path)])
    assert ended.value.code == 2 and "memory ran out: give a --budget below what is free" in capsys.readouterr().err


def test_validation_inside_a_budget_takes_one_picture_at_a_time_and_comes_to_the_same() -> None:
    torch.manual_seed(0)
    model, images = ConditionalUNet(Sizes(**TINY_SIZES)), data.synthetic(60, 8)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    whole, parts = (validation_loss(model, images, 4, 0.5, one_by_one) for one_by_one in (False, True))
    assert seen == [4, 2, *[1] * 6] and parts == pytest.approx(whole, rel=1e-6)
    assert validation_loss(model, images, 4, 0.05) != whole  # some classes are dropped, and it matters which


def test_the_step_and_the_samples_are_where_the_model_is() -> None:
    """On a device without memory, since there is no card here: what is left on the CPU would not go together with it."""
    elsewhere = torch.device("meta")
    sizes = Sizes(**TINY_SIZES)
    step = steps.build_step(sizes, OptimizationConfig(), steps.sample_batch(sizes, 2), device=elsewhere)
    assert step.run(step.batch)[""].device == elsewhere
    noise, y = torch.randn(2, 3, 8, 8, device=elsewhere), torch.ones(2, dtype=torch.long, device=elsewhere)
    assert sample(step.models[""], y, noise, 2).device == elsewhere


def simulated(samples: int, **settings: object) -> memfit.Ledger:
    """As on a GPU, whose kernels need not be tried out first."""
    return memfit.profile(built_without_memory(lambda: steps.step_of(samples, **settings)), simulate=True, device="cuda")  # type: ignore[arg-type]


def test_the_finding_names_the_line_and_the_factor() -> None:
    ledger = simulated(8, image_size=16, attention_resolutions=(8,))
    found = {finding.kind: finding for finding in ledger.findings}
    lines = Path(sys.modules[ConditionProduct.__module__].__file__ or "").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if "einsum" in text]
    assert f"conditioning.py:{line}" in found["outer_product"].where
    assert "×512" in found["outer_product"].why and "8×512×512" in found["outer_product"].why
    assert "encoder_kv" in found["outer_product"].why and "attention_map" in found


@pytest.mark.parametrize("mode", ["training", "class", "null"])
def test_factored_gives_the_same_outputs_and_gradients(mode: str) -> None:
    found = difference("factored", mode)
    assert found.output < 1e-13 and found.gradients < 1e-12


def test_the_documented_methods_are_not_all_the_same_training() -> None:
    assert difference("conditional", "null").output > 0.01  # None is not a zero condition: the check above can fail
    assert difference("conditional", "training").gradients == 0 and difference("chunked", "class").gradients == 0
    assert np.isnan(difference("low_rank", "training").gradients)  # labels repeat and are dropped


def test_the_lever_and_the_method_are_the_same() -> None:
    step = steps.step_of(4, **TINY_SIZES)
    options = LEVERS["outer_product"].options(memfit.profile(step, simulate=True))
    with LEVERS["outer_product"].apply(step, options[0]):
        fitted = step.run(step.batch)[""]
        assert isinstance(step.models[""].product(torch.ones(1, 4)), FactoredContext)  # type: ignore[operator]
    built = steps.step_of(4, optimization=PRESETS["factored"], **TINY_SIZES)
    torch.manual_seed(3)
    assert fitted.isfinite() and isinstance(built.models[""].product(torch.ones(1, 4)), FactoredContext)  # type: ignore[operator]


def test_factored_takes_hardly_more_than_the_model_before_the_fix() -> None:
    def each(**form: object) -> float:
        return (simulated(16, **TINY_SIZES, **form).peak_bytes - simulated(8, **TINY_SIZES, **form).peak_bytes) / 8

    before = each(cemb_mm=False, kernel="fused")
    assert each(optimization=PRESETS["factored"]) < 1.02 * before
    assert each() > 1.2 * before


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_change_nothing(method: str) -> None:
    def gradients(use_checkpoint: bool) -> list[torch.Tensor]:
        settings = {"memory_optimization": True, "optimization_method": method, "use_checkpoint": use_checkpoint}
        step = steps.step_of(3, optimization=settings, **TINY_SIZES)
        torch.manual_seed(5)
        step.differentiate(step.all_phases[0], step.batch)
        return [p.grad for p in step.models[""].parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_the_condition_s_flags() -> None:
    torch.manual_seed(0)
    model, x, times = ConditionalUNet(SMALL), torch.randn(2, 3, 8, 8), torch.tensor([3, 900])
    with pytest.raises(ValueError, match="Invalid condition setup"):
        model(x, times, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="threshold is 0: it is the probability"):
        model(x, times, torch.tensor([1, 2]), threshold=0)
    with pytest.raises(ValueError, match="one class for each of the 2 samples"):
        model(x, times, torch.tensor([1]), threshold=0.5)
    dropped = model(x, times, torch.tensor([1, 2]), threshold=1.0)
    assert torch.equal(dropped, model(x, times, clf_free=True, null=True))
    assert not torch.allclose(dropped, model(x, times, torch.tensor([1, 2]), clf_free=True))
    assert ConditionalUNet(Sizes(**TINY_SIZES, num_classes=None))(x, times).shape == x.shape


def test_guidance_moves_samples_to_their_class() -> None:
    torch.manual_seed(0)
    model, noise, y = ConditionalUNet(SMALL, OptimizationConfig.of(PRESETS["factored"])), torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    free, strong, without = sample(model, None, noise, 3), sample(model, y, noise, 3, 3.0), sample(model, y, noise, 3, -1.0)
    assert torch.equal(free, without) and not torch.allclose(free, strong)


def test_the_batch_size_is_predicted() -> None:
    step = built_without_memory(lambda: steps.step_of(32, **TINY_SIZES))
    high = [memfit.profile(step, simulate=True).process_high_bytes for _ in range(2)][-1]  # a first simulation enlarges this process
    found = steps.get_optimal_batch_size(f"{high + 2**26}B", Sizes(**TINY_SIZES))
    assert 40 <= found <= 90  # at the upper end a sample takes 2.4 MiB; the documented formula says 32 to any memory
    assert steps.get_optimal_batch_size(0.001, Sizes(**TINY_SIZES)) == 0  # gigabytes, as documented


def test_wrong_config_keys_are_named() -> None:
    with pytest.raises(memfit.MemfitError, match="has no 'optimisation_method': its keys are memory_optimization, optimization_method"):
        OptimizationConfig.of({"optimisation_method": "factored"})


def test_cifar_as_npz_as_batches_and_as_folders(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "some.npz", x_train=x, y_train=y)
    planes = x.transpose(0, 3, 1, 2).reshape(20, -1)
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "data_batch_1").write_bytes(pickle.dumps({b"data": planes, b"labels": y.tolist()}, protocol=2))
    for kind in ("cat", "dog"):
        (tmp_path / "folders" / kind).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(x[number]).save(tmp_path / "folders" / kind / f"{number}.png")
    npz, batches, folders = (data.load(tmp_path / name, 32) for name in ("some.npz", "batches", "folders"))
    assert torch.equal(npz.x, batches.x) and torch.equal(npz.y, batches.y) and npz.held_out == 2
    assert folders.classes == ("cat", "dog") and any(torch.equal(folders.x[0], picture) for picture in npz.x[:3])
    assert data.load(tmp_path / "some.npz", 16).x.shape == (20, 3, 16, 16)


def _npz(x: Any, y: Any, **more: Any) -> dict[str, Any]:
    return {"x_train": x, "y_train": y, **more}


X, Y = np.zeros((6, 32, 32, 3), np.uint8), np.arange(6)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (b"", "cannot be read (EOFError('No data left in file')): it is damaged"),
        (b"PK\x03\x04 nonsense", "cannot be read (BadZipFile('File is not a zip file')): it is damaged"),
        (_npz(X / 255, Y), "holds float64 (6, 32, 32, 3) with int64 labels: it needs pictures [N, H, W, 3] of uint8"),
        (_npz(X.transpose(0, 3, 1, 2), Y), "holds uint8 (6, 3, 32, 32)"),
        (_npz(X, Y.astype(str)), "with <U21 labels"),
        (_npz(X, Y[:2]), "has 6 pictures and 2 labels: every picture needs one"),
        (_npz(X, Y - 1), "has labels from -1 to 4, and 5 classes"),
        (_npz(X, Y, classes=["cat", "dog"]), "has labels from 0 to 5, and 2 classes"),
        (_npz(X[:1], Y[:1]), "has 1 pictures: it takes at least two"),
        (_npz(X[:0], Y[:0]), "pictures: it takes at least two"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_data_that_is_damaged_or_no_pictures_is_told(held: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    path.write_bytes(held) if isinstance(held, bytes) else np.savez(path, **held)
    with pytest.raises(memfit.MemfitError) as told:
        data.load(path, 32)
    assert words in str(told.value) and str(path) in str(told.value)


def test_a_damaged_picture_and_a_damaged_batch_are_told(tmp_path: Path) -> None:
    (tmp_path / "folders" / "cat").mkdir(parents=True)
    (tmp_path / "folders" / "cat" / "one.png").write_bytes(b"no picture")
    (tmp_path / "data_batch_1").write_bytes(b"no pickle")
    for path, words in ((tmp_path / "folders", "cannot identify image file"), (tmp_path, "UnpicklingError")):
        with pytest.raises(memfit.MemfitError, match=words):
            data.load(path, 32)


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"nonsense")
    ended = run(*TINY, "--output-dir", tmp_path, "--resume")
    assert ended.returncode == 2 and ended.stderr.startswith(f"{tmp_path / 'last.pt'} cannot be read"), ended.stderr


def test_the_scale_of_use_fp16_goes_on(tmp_path: Path) -> None:
    from recipes.conditional_unet.train import main

    flags = [*TINY, "--use_fp16", "--sample-steps", "0", "--output-dir", str(tmp_path)]
    main([*flags, "--epochs", "1"])
    path = tmp_path / "last.pt"
    state = torch.load(path, weights_only=True)
    state["fitted"]["guard"]["scales"][""]["scale"] = 1024.0  # as if the first epoch had overflowed six times
    torch.save(state, path)
    main([*flags, "--epochs", "2", "--resume"])
    assert torch.load(path, weights_only=True)["fitted"]["guard"]["scales"][""]["scale"] == 1024.0


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(memfit.MemfitError, match=r"wants to call os\.system"):
        data.load(tmp_path, 32)


@pytest.mark.skipif(not REAL.exists(), reason="the real CIFAR-10 images are not beside this repository")
def test_real_images() -> None:
    images = data.load(REAL, 32)
    assert images.x.shape == (12000, 3, 32, 32) and images.training == 10000 and len(images.classes) == 10
