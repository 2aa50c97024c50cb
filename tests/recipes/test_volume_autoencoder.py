"""The volume autoencoder: run as a user runs it, its configuration, its data, and that fitted training is the original one."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml
from monai.losses import PatchAdversarialLoss

import memfit
from memfit.fitting.applying import apply_plan
from memfit.levers import LEVERS
from memfit.records import Option
from recipes.kit.budget import Original
from recipes.volume_autoencoder.config import Config, Discriminator, changed, load_config
from recipes.volume_autoencoder.data import DataError, loader_of, read, resized, sources_in, synthetic
from recipes.volume_autoencoder.model import Losses, _least_squares, build_models, build_step, generator_terms
from recipes.volume_autoencoder.perceptual import SlicePerceptualLoss
from recipes.volume_autoencoder.train_autoencoder import CONFIGS, made_up, main, step_of, with_precision
from recipes.volume_autoencoder.variants import altered

ROOT = Path(__file__).parents[2]
BRAINS = ROOT.parent / "shared" / "data"
TINY: dict[str, Any] = {
    "voxel_size": [24, 24, 24],
    "autoencoder": {
        "num_channels": [8, 8],
        "norm_num_groups": 4,
        "attention_levels": [False, True],
        "training": {"batch_size": 2, "gradient_accumulation_steps": 2, "discriminator": {"num_layers_d": 2, "num_channels": 4}},
    },
}


def written(folder: Path, **changes: Any) -> Path:
    """TINY as a file, with keys such as autoencoder__norm_num_groups changed."""
    content = yaml.safe_load(yaml.safe_dump(TINY))
    for key, value in changes.items():
        *way, last = key.split("__")
        place = content
        for word in way:
            place = place.setdefault(word, {})
        place[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes/volume_autoencoder/train_autoencoder.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    """The same without waiting for the imports once more."""
    monkeypatch.setattr(sys, "argv", ["train_autoencoder.py", *map(str, arguments)])
    main()


def tiny_step(**changes: Any) -> memfit.Step:
    torch.manual_seed(0)
    config = tiny_config(**changes)
    return build_step(config, torch.stack([synthetic(n, config.voxel_size) for n in range(config.samples_a_step)]))


def tiny_config(**changes: Any) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return load_config(written(Path(folder), **changes))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_the_documented_command_trains_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path)
    whole = run("--config", config, "--epochs", 2, "--output-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "8 synthetic volumes (--data-dir DIR takes yours) at 24×24×24, batch 2 × 2" in whole.stdout
    assert "Perceptual loss: fixed random features" in whole.stdout and "Epoch 2/2 | generator " in whole.stdout
    rows = list(csv.DictReader((tmp_path / "whole" / "log.csv").open()))
    assert len(rows) == 2 and float(rows[1]["l1"]) < float(rows[0]["l1"])
    assert (tmp_path / "whole" / "reconstruction_0002.png").stat().st_size > 1000
    for more in (["--epochs", 1], ["--epochs", 2, "--resume"]):
        run_here(monkeypatch, "--config", config, "--output-dir", tmp_path / "parts", *more)
    ends = [torch.load(tmp_path / name / "last.pt") for name in ("whole", "parts")]
    logs = [end.pop("log").splitlines() for end in ends]  # times and memory are in it
    assert same(*ends) and len(logs[0]) == len(logs[1]) == 3
    ends[1]["autoencoder"]["decoder.blocks.0.conv.weight"][0] += 1e-6
    assert not same(*ends)


ONE_PART = {"autoencoder__training__gradient_accumulation_steps": 1, "autoencoder__training__use_perceptual_loss": False}


def less_than_needed(step: memfit.Step, share: float) -> int:
    """A budget that the original is predicted to miss by a share of its peak."""
    ledger = memfit.profile(step, simulate=True)
    return ledger.process_high_bytes - int(share * ledger.peak_bytes)


def test_a_budget_fits_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fitted run says what it did, and that it is proven."""
    budget = less_than_needed(tiny_step(**ONE_PART), 0.1)
    config = written(tmp_path, **ONE_PART)
    run_here(monkeypatch, "--config", config, "--epochs", 1, "--output-dir", tmp_path / "run", "--budget", budget)
    told = capsys.readouterr().out
    assert re.search(r"memfit: \w+: ", told) and "proven" in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"autoencoder__norm_num_groups": 3}, "is 3, which does not divide 8 of num_channels [8, 8]: write norm_num_groups: 2 "),
        ({"autoencoder__num_channels": [12, 24, 48], "autoencoder__norm_num_groups": 8, "autoencoder__attention_levels": [False] * 3},
         "does not divide 12 of num_channels [12, 24, 48]: write norm_num_groups: 6 (possible are 1, 2, 3, 4, 6, 12)"),
        ({"autoencoder__attention_levels": [True]},
         "attention_levels has 1 values and num_channels 2: write one for each level, as in attention_levels: [true, false]"),
        ({"data__voxel_size": [8, 8, 8]}, "there is no key data.voxel_size. Did you mean voxel_size?"),
        ({"autoencoder__batch_size": 1}, "there is no key autoencoder.batch_size. Did you mean autoencoder.training.batch_size?"),
        ({"devise": {}}, "there is no key devise. Did you mean device? The file has voxel_size, autoencoder, device, data."),
        ({"device__mixed_precision": "maybe"}, "device.mixed_precision is 'maybe': write one of true or false"),
        ({"autoencoder__num_channels": "16, 32"}, "num_channels is '16, 32': write a list of whole numbers"),
        ({"autoencoder__training": 4}, "autoencoder.training must be a section with keys, not 4"),
        ({"autoencoder__training__batch_size": 0}, "batch_size is 0: write 1 or more"),
        ({"voxel_size": [24, 24, 25]}, "25 does not work"),
        ({"voxel_size": [24, 24, 16]}, "16 does not work, the perceptual loss needs 17 or more. Write 18 there."),
        ({"data__cache_rate": 2}, "data.cache_rate is a share between 0 and 1"),
        ({"voxel_size": "é".encode("latin-1")}, "voxel_size is b'\\xe9': write a list of whole numbers"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_one_message_and_exit_code_2(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, "--config", written(tmp_path, **changes))
    message = capsys.readouterr().err
    assert ended.value.code == 2 and told in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file"),
        ([], "the following arguments are required: --config"),
        (["--config", "CONFIG", "--data-dir", "nowhere"], "nowhere is not a directory"),
        (["--config", "CONFIG", "--data-dir", "x", "--data", "synthetic"], "not allowed with argument --data-dir"),
        (["--config", "CONFIG", "--perceptual-weights", "nowhere.pth"], "nowhere.pth"),
        (["--config", "CONFIG", "--resume"], "There is nothing to resume"),
        (["--config", "CONFIG", "--lr", "-1"], "argument --lr: -1 is not a number above 0"),
        (["--config", "CONFIG", "--epochs", "0"], "argument --epochs: 0 is not a whole number from 1 up"),
        (["--config", "CONFIG", "--budget", "some"], "'some' is not an amount of memory above zero"),
    ],
)
def test_wrong_flags_are_told(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(written(tmp_path)) if word == "CONFIG" else word for word in arguments]
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, *arguments, "--output-dir", tmp_path / "run")
    assert ended.value.code == 2 and told in capsys.readouterr().err


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, str]:
    """How a run that must not succeed ends: its exit code, and the one message."""
    with pytest.raises(SystemExit) as stopped:
        run_here(monkeypatch, *arguments)
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize("cache_rate", [0, 1.0])
def test_a_damaged_volume_is_one_message(
    cache_rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """monai wraps what a transform raises, whether it caches or not."""
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / "a.npz").write_bytes(b"PK no archive")
    config = written(tmp_path, data__cache_rate=cache_rate)
    code, told = ended(monkeypatch, capsys, "--config", config, "--data-dir", tmp_path / "volumes", "--output-dir", tmp_path / "run")
    assert code == 2 and "a.npz cannot be read as a volume: " in told and told.count("\n") == 1


def test_a_damaged_checkpoint_or_file_of_weights_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--config", written(tmp_path, **ONE_PART), "--output-dir", tmp_path]
    (tmp_path / "last.pt").write_bytes(b"PK no checkpoint")
    code, told = ended(monkeypatch, capsys, *command, "--resume")
    assert code == 2 and "last.pt cannot be read: it is damaged" in told
    code, told = ended(monkeypatch, capsys, *command, "--perceptual-weights", tmp_path / "last.pt")
    assert code == 2 and "--perceptual-weights needs autoencoder.training.use_perceptual_loss: true" in told
    written(tmp_path)
    code, told = ended(monkeypatch, capsys, *command, "--perceptual-weights", tmp_path / "last.pt")
    assert code == 2 and "last.pt is not torchvision's squeezenet1_1" in told and told.count("\n") == 1


ONE_VARIANT = {**ONE_PART, "autoencoder__num_channels": [1, 8], "autoencoder__norm_num_groups": 1}  # no fewer channels are possible


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Fit with few levers, so that planning takes seconds."""
    monkeypatch.setattr(memfit, "fit", partial(memfit.fit, levers={name: LEVERS[name] for name in names}))


def test_a_budget_that_nothing_fits_is_an_honest_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch)
    command = ["--config", written(tmp_path, **ONE_VARIANT), "--output-dir", tmp_path / "run", "--budget", "100MiB"]
    code, told = ended(monkeypatch, capsys, *command)
    assert code == 1 and told.startswith("This step does not fit 100 MiB")
    assert re.search(r"the variant 'half the resolution in plane', as it is: [\d.]+ MiB \(another training\)", told)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["--config", written(tmp_path, **ONE_PART), "--output-dir", tmp_path / "run", "--epochs", 1]
    run_here(monkeypatch, *command)
    run_here(monkeypatch, *command, "--resume")
    assert "Nothing is left to do: 1 epochs are done, and --epochs is 1." in capsys.readouterr().out


def test_altered_training_is_planned_on_request() -> None:
    """Half the resolution, where nothing else is allowed to help."""
    config = tiny_config(**ONE_VARIANT, voxel_size=[32, 32, 32])
    lower = "half the resolution in plane"
    step = made_up(config, variants={lower: partial(made_up, altered(config)[lower])})
    plain, half = (memfit.profile(it, simulate=True) for it in (step, step.variants[lower]()))
    budget = half.process_high_bytes + (plain.process_high_bytes - half.process_high_bytes) // 2
    plan = memfit.plan(step, budget, allow="altered", levers={"architecture": LEVERS["architecture"]})
    assert [(lever.name, lever.option, lever.exactness) for lever in plan.levers] == [
        ("architecture", "half the resolution in plane", "altered")
    ]
    assert plan.levers[0].saves_bytes == plain.peak_bytes - half.peak_bytes > 0


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_an_altered_training_is_saved_and_resumed(
    mixed_precision: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained, drawn and saved is the variant, at its size; the configured models never train."""
    seen: list[tuple[int, ...]] = []

    def altered_call(step: memfit.Step, *more: Any) -> Original:
        LEVERS["architecture"].apply(step, Option("architecture", NARROW, "altered", {"variant": NARROW}))
        step.models["autoencoder"].register_forward_hook(lambda module, given, made: seen.append(tuple(given[0].shape)))
        return Original(step)

    monkeypatch.setattr("recipes.volume_autoencoder.train_autoencoder.training_call", altered_call)
    monkeypatch.setattr("recipes.volume_autoencoder.train_autoencoder.altered", lambda config: {NARROW: narrow_and_small(config)})
    config = written(tmp_path, **ONE_PART, device__mixed_precision=mixed_precision)
    command = ["--config", config, "--output-dir", tmp_path / "run"]
    run_here(monkeypatch, *command, "--epochs", 1)
    saved = torch.load(tmp_path / "run" / "last.pt")
    assert set(seen) == {(2, 1, 12, 12, 24)} and saved["autoencoder"]["encoder.blocks.0.conv.weight"].shape[0] == 4
    assert int(saved["optimizer"]["state"][0]["step"]) == 4  # of 8 volumes, two at a time
    assert ("guard" in saved["fitted"]) == mixed_precision
    run_here(monkeypatch, *command, "--epochs", 2, "--resume")
    again = torch.load(tmp_path / "run" / "last.pt")
    assert int(again["optimizer"]["state"][0]["step"]) == 8 and not same(saved["autoencoder"], again["autoencoder"])


NARROW = "narrow and small"


def narrow_and_small(config: Config) -> Config:
    return changed(config, num_channels=(4, 8), voxel_size=(12, 12, 24))


def test_variants_are_the_guides_rungs() -> None:
    """Fewer channels are the documented ones; what changes nothing, or makes volumes too small for the discriminator, is no variant."""
    default = load_config(CONFIGS / "default.yaml")
    found = altered(default)
    names = ["no perceptual loss", "channels [16, 32, 64]", "smaller discriminator", "fewer attention levels"]
    assert list(found) == [*names, "half the resolution in plane"]
    assert found["smaller discriminator"].autoencoder.training.discriminator == Discriminator(2, 16)
    assert not any(found["fewer attention levels"].autoencoder.attention_levels)
    narrow = found["channels [16, 32, 64]"].autoencoder
    assert (narrow.num_channels, narrow.norm_num_groups) == ((16, 32, 64), 8)
    assert found["half the resolution in plane"].voxel_size == (32, 32, 64)
    preset_a = ["channels [8, 16, 64]", "fewer attention levels", "half the resolution in plane"]  # its discriminator is the small one
    assert list(altered(load_config(CONFIGS / "preset_a.yaml"))) == preset_a
    assert "half the resolution in plane" not in altered(changed(default, voxel_size=(24, 24, 24)))


@pytest.mark.parametrize("name", ["default", "preset_a", "preset_b", "preset_c"])
def test_the_presets_run(name: str) -> None:
    """From their files, at a size that takes seconds."""
    step = step_of(name, voxel_size=(24, 24, 24), **({"batch_size": 2} if name == "preset_c" else {}))
    losses = step.run(step.batch)
    assert all(bool(torch.isfinite(loss)) for loss in losses.values())
    assert (step.running.guard is not None) == (name != "default")  # mixed_precision: true


def test_every_config_is_whole() -> None:
    names = {path.stem for path in CONFIGS.glob("*.yaml") if load_config(path)}
    assert {"default", "preset_a", "preset_b", "preset_c", "ldm_config_high_res"} <= names
    c = load_config(CONFIGS / "preset_c.yaml").autoencoder
    assert (c.num_channels, c.norm_num_groups, c.attention_levels, c.training.batch_size) == ((32, 64, 128), 16, (False, True, True), 4)


def test_accumulation_is_the_documented_loop_and_not_the_larger_batch() -> None:
    """Each part has BatchNorm statistics of its own in the discriminator, so "the equivalent of a larger batch" does not hold."""

    def gradients(take: Callable[[Any, torch.Tensor], None]) -> list[torch.Tensor]:
        step = tiny_step(autoencoder__training__use_perceptual_loss=False)
        torch.manual_seed(1)
        take(step.model, step.batch)
        return [p.grad for p in step.models["autoencoder"].parameters() if p.grad is not None]

    def by_hand(models: Any, batch: torch.Tensor) -> None:
        for part in batch.split(2):
            (generator_terms(models, part)[0] * 0.5).backward()

    accumulated = gradients(lambda models, batch: Losses(2).generator(models, batch, {}).backward())
    whole = gradients(lambda models, batch: Losses(4).generator(models, batch, {}).backward())
    assert all(map(torch.equal, accumulated, gradients(by_hand)))
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(accumulated, whole, strict=True))


def test_results_are_made_again_inside_accumulated_parts_bit_for_bit() -> None:
    ends = []
    for fitted in (False, True):
        step = tiny_step(autoencoder__training__use_perceptual_loss=False)
        if fitted:
            LEVERS["saved"].apply(step, LEVERS["saved"].options(memfit.profile(step, simulate=True))[0])
        torch.manual_seed(1)
        step.run(step.batch)
        ends.append({name: net.state_dict() for name, net in step.models.items()})
    assert same(*ends)


def test_a_nan_is_named_and_nothing_is_lost() -> None:
    config = tiny_config(device__mixed_precision=True)
    step = with_precision(tiny_step(), config)
    step.run(step.batch)
    weight = step.models["autoencoder"].decoder.blocks[1].conv1.conv.weight  # type: ignore[union-attr, index]
    right = weight.detach().clone()
    with torch.no_grad():
        weight[0] = float("inf")
    before = {name: {k: v.clone() for k, v in net.state_dict().items()} for name, net in step.models.items()}
    with pytest.warns(UserWarning) as warned:
        step.run(step.batch)
    told = [str(warning.message) for warning in warned]
    assert "in phase 'generator': it first appears in the output of autoencoder.decoder.blocks.1.conv1" in told[0]
    assert "in phase 'discriminator': it is already in the batch, or in what the phase before left" in told[1]
    assert all(same(before[name], net.state_dict()) for name, net in step.models.items())
    with torch.no_grad():
        weight.copy_(right)
    assert all(bool(torch.isfinite(loss)) for loss in step.run(step.batch).values())
    assert not same(before["autoencoder"], step.models["autoencoder"].state_dict())


def test_the_perceptual_network_has_squeezenets_shape_and_takes_its_weights(tmp_path: Path) -> None:
    net = SlicePerceptualLoss()
    assert sum(p.numel() for p in net.features.parameters()) == 722_496  # torchvision's squeezenet1_1 without its classifier
    assert same(net.state_dict(), SlicePerceptualLoss().state_dict())
    torch.save(
        {f"features.{k}": v * 2 for k, v in net.features.state_dict().items()} | {"classifier.1.weight": torch.ones(1)}, tmp_path / "w.pth"
    )
    loaded = SlicePerceptualLoss(tmp_path / "w.pth")
    assert torch.equal(loaded.features[0].weight, net.features[0].weight * 2)
    x, y = torch.rand(2, 1, 20, 24, 28), torch.rand(2, 1, 20, 24, 28)
    assert float(net(x, x)) == 0.0 and float(net(x, y)) > 0.0


def test_the_adversarial_loss_is_monais() -> None:
    logits = torch.randn(2, 1, 3, 3, 3)
    for wanted in (True, False):
        assert torch.allclose(_least_squares(logits, float(wanted)), PatchAdversarialLoss()(logits, wanted, for_discriminator=True))


def test_volumes_are_read_from_files(tmp_path: Path) -> None:
    volume = np.arange(60.0).reshape(3, 4, 5)
    nibabel.save(nibabel.Nifti1Image(volume.astype(np.int16), np.eye(4)), tmp_path / "a.nii.gz")
    np.savez(tmp_path / "b.npz", t1=volume, labels=volume)
    np.savez(tmp_path / "c.npz", head=volume, age=np.ones(1))
    found = sources_in(tmp_path)
    assert [path.name for path in found if isinstance(path, Path)] == ["a.nii.gz", "b.npz", "c.npz"]
    for path in found:
        assert isinstance(path, Path) and np.array_equal(read(path).numpy(), volume)
    scaled = resized(read(tmp_path / "c.npz"), (6, 8, 10))
    assert scaled.shape == (1, 6, 8, 10) and float(scaled.min()) >= 0 and float(scaled.max()) <= 1
    np.savez(tmp_path / "d.npz", one=volume, two=volume)
    with pytest.raises(DataError, match=r"named t1 or alone .* it holds one \(3, 4, 5\), two \(3, 4, 5\)"):
        read(tmp_path / "d.npz")
    (tmp_path / "e.nii").write_text("no volume")
    with pytest.raises(DataError, match=r"e\.nii cannot be read as a volume"):
        read(tmp_path / "e.nii")


def test_the_cache_rate_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("recipes.volume_autoencoder.data.synthetic", lambda number, size: made.append(number) or synthetic(number, size))
    for rate, times in ((0, 2), (1.0, 1)):
        made.clear()
        loader = loader_of(list(range(4)), tiny_config(data__cache_rate=rate), torch.Generator())
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 4
        assert sorted(made) == sorted([0, 1, 2, 3] * times)


def brains(config: Config) -> torch.Tensor:
    if not BRAINS.is_dir():
        pytest.skip(f"no real brain volume in {BRAINS}")
    return torch.stack([resized(read(BRAINS / name), config.voxel_size) for name in ("mni152.npz", "colin27.npz")])


def test_a_real_brain_is_reconstructed_alike_by_original_and_fitted_training() -> None:
    batch, made = brains(tiny_config(**ONE_PART)), []
    for fitted in (False, True):
        step = tiny_step(**ONE_PART)
        if fitted:
            inside = {name: LEVERS[name] for name in ("saved", "attention")}  # not the allocator's, which is enough in some processes
            plan = memfit.plan(step, less_than_needed(step, 0.33), levers=inside)
            assert plan.levers
            apply_plan(step, plan)
        torch.manual_seed(3)
        for _ in range(4):
            step.run(batch)
        made.append(step.models["autoencoder"].reconstruct(batch).detach())  # type: ignore[operator]
    assert float((made[0] - made[1]).abs().max()) < 1e-5
    untrained = tiny_step(**ONE_PART).models["autoencoder"].reconstruct(batch).detach()  # type: ignore[operator]
    assert float((made[0] - untrained).abs().max()) > 1e-3


def test_models_without_the_perceptual_loss_have_no_such_network() -> None:
    assert "perceptual" not in build_models(tiny_config(autoencoder__training__use_perceptual_loss=False))
