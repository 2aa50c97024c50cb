"""The radar VAE: documented sizes and flags, exact micro-batches, a codebook that they do not disturb, both stages as a user runs them."""

from __future__ import annotations

import copy
import csv
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.levers import LEVERS
from memfit.records import Option, PlannedLever
from memfit.units import parse_bytes
from recipes.kit.budget import Original
from recipes.radar_vae import full_size, losses
from recipes.radar_vae import train_latent_diffusion as entry
from recipes.radar_vae.codebook import Codebook, EMACodebook
from recipes.radar_vae.data import DataError, Grid, PointWindows, SyntheticVolumes, open_data, voxelise
from recipes.radar_vae.diffusion import LatentUNet, diffusion_loss, one_by_one_loss, sample_latents
from recipes.radar_vae.losses import Perceptual3DLoss
from recipes.radar_vae.model import GRID, latent_shape, make_vae
from recipes.radar_vae.stages import judged, loader_of, one_by_one
from recipes.radar_vae.train_latent_diffusion import corner_of, latents_of, main, make_documented_step, make_ldm_step, make_step

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "recipes/radar_vae/train_latent_diffusion.py"
POINTS = ROOT.parent / "shared/data/radhar.npz"
TINY = ["--data", "synthetic", "--max_samples", "6", "--num_workers", "0"]
VAE = ["--mode", "train_vae", "--vae_type", "ultra_lightweight", "--grid", "4", "16", "16", *TINY]


# --- the model, as documented ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vae_type", "millions"), [("lightweight", 7.65), ("ultra_lightweight", 0.69)])
def test_parameter_counts_are_the_documented_ones(vae_type, millions):
    count = sum(p.numel() for p in make_vae(vae_type).parameters())

    assert count / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("vae_type", ["standard", "lightweight", "ultra_lightweight", "vq_vae"])
def test_latent_and_reconstruction_have_the_documented_shapes(vae_type):
    with torch.device("meta"):
        vae, voxels = make_vae(vae_type), torch.zeros(1, 4, *GRID)

    latent = vae.latent_of(voxels)

    assert latent.shape[1:] == latent_shape(GRID) == (4, 16, 32, 32)
    assert vae(voxels)[0].shape == voxels.shape


def test_no_batch_norm_anywhere():
    for vae_type in ("standard", "vq_vae"):
        assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in make_vae(vae_type).modules())


def test_perceptual_loss_is_for_volumes_and_teaches():
    loss, real = Perceptual3DLoss(), torch.rand(2, 4, 4, 16, 16)
    made = torch.rand_like(real).requires_grad_()

    loss(made, real).backward()

    assert made.grad is not None and made.grad.abs().sum() > 0
    assert not any(p.requires_grad for p in loss.parameters())
    assert loss(real, real) == 0
    with pytest.raises(ValueError, match=r"volumes \[batch, channels, z, y, x\]"):
        loss(real[:, :, 0], real[:, :, 0])


def test_what_memfit_finds_at_the_documented_size():
    ledger = memfit.profile(built_without_memory(make_documented_step), simulate=True, device="cuda")

    assert ledger.peak_bytes > 60 * 2**30
    assert {"batch_activations", "cheap_activations"} <= {finding.kind for finding in ledger.findings}


# --- micro-batches are exact -------------------------------------------------------------------------------------------------------------


def _gradients(step: memfit.Step) -> list[torch.Tensor]:
    torch.manual_seed(3)
    step.differentiate(step.all_phases[0], step.batch)
    return [p.grad.clone() for model in step.models.values() for p in model.parameters() if p.grad is not None]


def _furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(some, others, strict=True) if b.norm() > 0)


def _in_float64(vae_type: str, batch: int) -> memfit.Step:
    torch.manual_seed(0)
    step = make_step(vae_type, batch, (4, 16, 16))
    for model in step.models.values():
        model.double()
    return memfit.Step(step.model, step.loss, step.optimizers, step.batch.double())


@pytest.mark.parametrize("vae_type", ["ultra_lightweight", "vq_vae"])
def test_one_sample_at_a_time_gives_the_whole_batchs_gradient(vae_type):
    whole, parts = _in_float64(vae_type, 3), _in_float64(vae_type, 3)
    microbatch = LEVERS["microbatch"]
    options = microbatch.options(memfit.profile(parts, simulate=True, device="cuda"))  # no workspaces to be measured

    with microbatch.apply(parts, options[-1]):
        exact = _furthest(_gradients(parts), _gradients(whole))

    assert options[-1].settings["size"] == 1 and options[-1].exactness == "reordered"
    assert exact < 1e-9


def test_accumulation_that_forgets_the_noise_or_the_weight_is_not_the_same():
    whole, parts = _in_float64("ultra_lightweight", 3), _in_float64("ultra_lightweight", 3)
    reference = _gradients(whole)
    torch.manual_seed(4)  # other noise for the latents

    for piece in parts.batch.split(2):
        (parts.loss(parts.model, piece) / 2).backward()  # the last part has one sample, not two
    wrong = [p.grad for p in parts.model["vae"].parameters()]

    assert _furthest(wrong, reference) > 1e-3


# --- the codebook ------------------------------------------------------------------------------------------------------------------------


def _moved(book: Codebook, parts: int, steps_each: bool = False) -> torch.Tensor:
    """The codes after one step on the same latents, in so many parts; `steps_each` moves them after every part."""
    book = copy.deepcopy(book)
    optimizer = EMACodebook([book])
    latents = torch.randn(4, 4, 2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for part in latents.chunk(parts):
        share = 1.0 if steps_each else 1 / parts
        (book(part)[2] * share).backward()
        if steps_each:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return book.codes.detach()


def test_codes_move_alike_for_a_batch_and_for_its_parts():
    torch.manual_seed(0)
    book = Codebook(64).double()

    whole, parts, wrong = _moved(book, 1), _moved(book, 4), _moved(book, 4, steps_each=True)

    assert not torch.equal(whole, book.codes)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-12)
    assert (wrong - whole).abs().max() > 1e-3  # what a codebook does that is updated inside forward


def test_the_nearest_code_is_found_in_full_precision_also_under_autocast():
    torch.manual_seed(0)
    book, latent = Codebook(8192), torch.randn(1, 4, 8, 8, 8)

    with torch.autocast("cpu", torch.bfloat16):
        coded = book(latent)[0]

    assert torch.equal(coded, book(latent)[0])


def test_a_code_becomes_the_moving_average_of_what_chose_it():
    book = Codebook(2)
    with torch.no_grad():
        book.codes.copy_(torch.tensor([[0.0] * 4, [10.0] * 4]))
    optimizer = EMACodebook([book], decay=0.99)

    coded, commitment, learning = book(torch.full((1, 4, 1, 1, 2), 1.0))
    learning.backward()
    optimizer.step()

    assert torch.equal(coded, torch.zeros_like(coded)) and commitment.item() == 1.0 and learning.item() == 0.0
    assert torch.allclose(book.codes[0], torch.full((4,), 0.02 / 1.01))  # two seen: 0.99 × (0, 1) + 0.01 × (2, 2)
    assert torch.allclose(book.codes[1], torch.full((4,), 10.0))  # nobody chose it


def test_vq_vae_learns():
    torch.manual_seed(0)
    step = make_step("vq_vae", 2, (4, 16, 16))
    losses = [float(step.run(step.batch)[""]) for _ in range(8)]

    assert losses[-1] < losses[0]
    assert step.model["vae"].codebook.statistics.abs().sum() == 0


# --- the second stage --------------------------------------------------------------------------------------------------------------------


def test_diffusion_step_and_samples():
    assert tuple(built_without_memory(make_ldm_step).batch.shape) == (8, 4, 16, 32, 32)
    torch.manual_seed(0)
    unet = LatentUNet(16)
    unet.fit_scale(5 + 2 * torch.randn(8, 4, 2, 4, 4))

    made = sample_latents(unet, (2, 4, 2, 4, 4), steps=3)

    assert made.shape == (2, 4, 2, 4, 4) and made.isfinite().all()
    assert unet.standardise(torch.full((1, 4, 2, 4, 4), 5.0)).abs().max() < 1


def test_validation_takes_one_sample_at_a_time_and_comes_to_the_same():
    torch.manual_seed(0)
    step = make_step("ultra_lightweight", 3, (4, 16, 16))
    unet, latents = LatentUNet(16), torch.randn(3, 4, 2, 4, 4)
    seen: list[int] = []
    for model in (step.models["vae"], unet):
        model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    ways = [
        (partial(step.loss, step.model), one_by_one(step), step.batch),
        (partial(diffusion_loss, unet), partial(one_by_one_loss, unet), latents),
    ]

    with torch.no_grad():
        for whole, parts, batch in ways:
            both = [judged(list(batch), lambda given, loss=loss: float(loss(given)), 3)() for loss in (whole, parts)]
            assert both[1] == pytest.approx(both[0], rel=1e-5)

    assert seen == [3, 1, 1, 1, 3, 1, 1, 1]


# --- data --------------------------------------------------------------------------------------------------------------------------------


def test_points_become_voxels_and_outliers_stay_out():
    bounds = np.array([[0, 0, 0, -2, 0], [1, 1, 1, 2, 10]], dtype=np.float32)
    points = np.array([[0.9, 0.1, 0.6, 1, 5], [0.9, 0.1, 0.6, 3, 5], [7, 0.1, 0.6, 1, 5]], dtype=np.float32)

    volume = voxelise(points, bounds, (2, 4, 4))

    assert volume.shape == (4, 2, 4, 4) and int((volume[0] > 0).sum()) == 1
    occupancy, velocity, intensity, height = volume[:, 1, 0, 3]
    assert occupancy == pytest.approx(np.log(3) / np.log(21))
    assert (velocity, intensity, height) == pytest.approx((0.75, 0.5, 0.6))  # a velocity of 3 is clipped to 2


def test_windows_never_join_two_recordings():
    frame, rec = np.array([1, 60, 61, 1, 2], dtype=np.int32), np.array([0, 0, 0, 1, 1], dtype=np.int16)

    windows = PointWindows(np.zeros((5, 5), np.float32), frame, rec, np.array([[0] * 5, [1] * 5], np.float32), (2, 4, 4))

    assert windows.slices == [(0, 2), (2, 3), (3, 5)]


def test_folders_of_voxels(tmp_path):
    volume = SyntheticVolumes(1, (4, 8, 8), seed=0)[0].numpy()
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", volume)
    np.savez(tmp_path / "9.npz", voxels=volume)

    train, val = open_data(None, str(tmp_path), (4, 8, 8), None)

    assert (len(train), len(val)) == (4, 1) and torch.equal(val[0], torch.from_numpy(volume))
    with pytest.raises(DataError, match="--grid 4 8 8"):
        open_data(None, str(tmp_path), GRID, None)[0][0]
    with pytest.raises(DataError, match="does not divide"):
        open_data("synthetic", None, (4, 9, 8), None)


def test_damaged_voxels_are_told_by_their_name_also_out_of_a_loaders_worker(tmp_path):
    good = SyntheticVolumes(1, (4, 8, 8), seed=0)[0].numpy()
    np.save(tmp_path / "0.npy", good)
    np.save(tmp_path / "1.npy", good * np.nan)
    (tmp_path / "2.npy").write_text("no array")
    np.save(tmp_path / "3.npy", good[0])
    np.save(tmp_path / "4.npy", good)
    train, _ = open_data(None, str(tmp_path), (4, 8, 8), None)

    for number, words in ((1, "numbers that are not finite"), (2, "cannot be read: it is damaged"), (3, r"a volume is \[4, z, y, x\]")):
        with pytest.raises(DataError, match=f"^{tmp_path}/{number}.npy .*{words}"):
            train[number]
    with pytest.raises(DataError) as from_worker:
        list(loader_of(train, 4, workers=1))
    assert str(from_worker.value).startswith(f"{tmp_path}/1.npy holds numbers that are not finite")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (None, "cannot be read: it is damaged"),
        ({"train_xyzvi": np.zeros((3, 5))}, "has no train_frame, train_rec"),
        ({f"{p}_{what}": np.zeros(3) for p in ("train", "test") for what in ("xyzvi", "frame", "rec")}, "needs five finite numbers"),
    ],
)
def test_damaged_radar_points_get_one_message(arrays, words, tmp_path):
    file = tmp_path / "points.npz"
    np.savez(file, **arrays) if arrays else file.write_text("no archive")

    with pytest.raises(DataError, match=f"^{file} .*{words}"):
        open_data(None, str(file), (4, 8, 8), None)


@pytest.mark.skipif(not POINTS.exists(), reason="needs the real radar points of RadHAR, which are not part of the repository")
def test_real_radar_points():
    train, val = open_data(None, str(POINTS), (8, 32, 32), 16)

    assert (len(train), len(val)) == (16, 4)
    assert all(0.001 < float((train[n][0] > 0).float().mean()) < 0.5 for n in range(4))


# --- as a user runs it -------------------------------------------------------------------------------------------------------------------


def _run(*flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ENTRY), *map(str, flags)], capture_output=True, text=True, check=False)


def _weights(path: Path, part: str = "vae") -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)[part]


def _same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in others)


def test_both_stages_resume_and_sampling(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    documented = [*VAE, "--batch_size", 1, "--gradient_accumulation_steps", 4]
    for flags in ([*documented, "--vae_epochs", 2, "--output-dir", whole], [*documented, "--vae_epochs", 1, "--output-dir", parts]):
        assert _run(*flags).returncode == 0
    assert not _same(_weights(parts / "vae/last.pt"), _weights(whole / "vae/last.pt"))  # one epoch is not two

    assert _run(*documented, "--vae_epochs", 2, "--output-dir", parts, "--resume").returncode == 0

    assert _same(_weights(parts / "vae/last.pt"), _weights(whole / "vae/last.pt"))
    assert (parts / "vae/log.csv").read_text() == (whole / "vae/log.csv").read_text()
    losses = [float(row["val_loss"]) for row in csv.DictReader((whole / "vae/log.csv").open())]
    assert len(losses) == 2 and losses[1] < losses[0]

    ldm = ["--mode", "train_ldm", "--ldm_epochs", 1, "--batch_size", 4, "--vae_ckpt", whole / "vae/last.pt", *TINY]
    assert "LDM epoch 1/1 | loss" in _run(*ldm, "--output-dir", whole).stdout
    sample = ["--mode", "sample", "--num_samples", 2, "--vae_ckpt", whole / "vae/last.pt", "--ldm_ckpt", whole / "ldm/last.pt"]
    assert _run(*sample, "--output-dir", whole).returncode == 0
    assert (whole / "samples.png").stat().st_size > 0 and (whole / "vae/epoch_0002.png").exists()
    assert np.load(whole / "samples.npz")["voxels"].shape == (2, 4, 4, 16, 16)


def _here(monkeypatch, *flags: object) -> None:
    """In this process; a mistake ends it as it ends the program."""
    monkeypatch.setattr(sys, "argv", [str(ENTRY), *map(str, flags)])
    main()


def test_a_resumed_run_knows_its_best_epoch_and_takes_a_rate_that_is_given(tmp_path, monkeypatch):
    last, best = tmp_path / "vae/last.pt", tmp_path / "vae/best.pt"
    _here(monkeypatch, *VAE, "--vae_epochs", 1, "--output-dir", tmp_path)
    state = torch.load(last, weights_only=True)
    assert best.exists() and state["best"]["loss"] < float("inf")
    torch.save(state | {"best": {"loss": 0.0}}, last)  # nothing will be better
    best.unlink()

    _here(monkeypatch, *VAE, "--vae_epochs", 2, "--output-dir", tmp_path, "--resume", "--lr", 0.3)

    state = torch.load(last, weights_only=True)
    assert not best.exists() and state["best"]["loss"] == 0.0
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.3


@pytest.mark.parametrize(("more", "words"), [([], "The loss of epoch 1 is inf"), (["--use_amp"], "Not one of the 1 steps of epoch 1")])
def test_a_training_that_is_not_finite_ends_with_a_message(more, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(losses, "PERCEPTUAL_WEIGHT", float("inf"))
    amp = pytest.warns(UserWarning, match="A NaN or an infinity under bfloat16") if more else nullcontext()

    with pytest.raises(SystemExit) as ended, amp:
        _here(monkeypatch, *VAE, "--vae_epochs", 1, "--output-dir", tmp_path, *more)

    assert ended.value.code == 1 and capsys.readouterr().err.startswith(words) and not (tmp_path / "vae/last.pt").exists()


def test_half_precision_trains_and_skips_only_what_is_not_finite():
    torch.manual_seed(0)
    step = make_step("ultra_lightweight", 2, (4, 16, 16), amp=True)
    weights = copy.deepcopy(step.models["vae"].state_dict())

    with pytest.warns(UserWarning, match="it is already in the batch"):
        step.run(step.batch * float("nan"))

    assert _same(step.models["vae"].state_dict(), weights)
    assert step.running.guard.state_dict()["skipped"] == 1


def test_latents_keep_the_scale_of_the_runs_beginning(tmp_path, monkeypatch):
    """After a resume with other volumes, too: the checkpoint's statistics are those the network has learnt with."""
    _here(monkeypatch, *VAE, "--vae_epochs", 1, "--output-dir", tmp_path)
    ldm = ["--mode", "train_ldm", "--vae_ckpt", tmp_path / "vae/last.pt", "--output-dir", tmp_path]
    _here(monkeypatch, *ldm, *TINY, "--ldm_epochs", 1)
    given: list[torch.Tensor] = []
    monkeypatch.setattr(entry, "judged", lambda samples, loss, batch: given.extend(samples) or judged(samples, loss, batch))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(entry, "latents_of", lambda *more: seen.append(latents_of(*more)) or seen[-1])

    _here(monkeypatch, *ldm, "--data", "synthetic", "--max_samples", 3, "--num_workers", 0, "--ldm_epochs", 2, "--resume")

    unet = LatentUNet()
    unet.load_state_dict(_weights(tmp_path / "ldm/last.pt", "model"))
    assert torch.equal(torch.stack(given), unet.standardise(seen[1]))
    unet.fit_scale(seen[0])
    assert not torch.equal(torch.stack(given), unet.standardise(seen[1]))


def test_an_altered_training_is_the_smallest_type_and_says_so_in_its_checkpoint(tmp_path, monkeypatch):
    def altered_call(step: memfit.Step, *more: object, **others: object) -> Original:
        LEVERS["architecture"].apply(step, Option("architecture", "ultra_lightweight", "altered", {"variant": "ultra_lightweight"}))
        return Original(step)

    monkeypatch.setattr(entry, "training_call", altered_call)
    flags = ["--mode", "train_vae", "--vae_type", "lightweight", "--grid", 4, 16, 16, *TINY, "--vae_epochs", 1, "--output-dir", tmp_path]

    _here(monkeypatch, *flags, "--allow", "altered")

    state = torch.load(tmp_path / "vae/last.pt", weights_only=True)
    assert state["facts"]["vae_type"] == "ultra_lightweight" and sum(t.numel() for t in state["vae"].values()) < 10**6


@pytest.mark.parametrize("stage", ["vae", "ldm"])
def test_the_launch_script_runs_a_stage(stage, tmp_path, monkeypatch):
    more = ["--data", "synthetic", "--max_samples", "2", "--num_workers", "0", "--output-dir", str(tmp_path)]
    more += ["--grid", "8", "32", "32", "--vae_epochs", "1"] if stage == "vae" else ["--ldm_epochs", "1"]
    if stage == "ldm":
        _here(monkeypatch, *VAE, "--vae_epochs", 1, "--output-dir", tmp_path)
        more += ["--vae_ckpt", str(tmp_path / "vae/last.pt")]

    monkeypatch.setenv("PYTHON", sys.executable)
    ended = subprocess.run(["sh", str(ENTRY.with_name("launch.sh")), stage, *more], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    assert f"{stage.upper()} epoch 1/1 | loss" in ended.stdout and (tmp_path / stage / "last.pt").exists()


_FOR_THE_PROOF = 100 * 2**20  # planning and proving make the process grow


def test_fitted_to_a_budget_it_is_the_same_training(tmp_path):
    sized = [*VAE[:4], "--grid", 8, 48, 48, *TINY, "--batch_size", 4, "--vae_epochs", 1]

    refused = _run(*sized, "--output-dir", tmp_path / "refused", "--budget", "100MiB")
    enough = re.findall(r"a budget of (.*) or more", refused.stderr)[0]  # interpreter and libraries differ from machine to machine
    plain = _run(*sized, "--output-dir", tmp_path / "plain")
    fitted = _run(*sized, "--output-dir", tmp_path / "fitted", "--budget", parse_bytes(enough) + _FOR_THE_PROOF)

    assert refused.returncode == 1 and refused.stderr.startswith("This step does not fit 100 MiB")
    assert plain.returncode == 0 and "memfit:" not in plain.stdout
    assert fitted.returncode == 0, fitted.stderr
    assert "proven" in fitted.stdout and "nothing to do" not in fitted.stdout
    ours, theirs = (_weights(tmp_path / kind / "vae/last.pt") for kind in ("fitted", "plain"))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4
    assert "fitted" in torch.load(tmp_path / "fitted/vae/last.pt", weights_only=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "train_vae", "--vae_type", "tiny"], "invalid choice: 'tiny'"),
        (["--mode", "train_vae"], "There is no data: name a folder or a file with --dataset_dir"),
        (["--mode", "train_vae", "--batch_size", "0"], "0 is not a whole number from 1 up"),
        (["--mode", "train_ldm", "--data", "synthetic"], "--vae_ckpt is missing"),
        ([*VAE, "--resume"], "nothing to resume"),
        ([*VAE, "--lr", "-1"], "--lr: -1 is not a number above 0"),
        ([*VAE, "--num_workers", "-1"], "--num_workers: -1 is not a whole number from 0 up"),
        ([*VAE, "--vae_epochs", "0"], "--vae_epochs: 0 is not a whole number from 1 up"),
        ([*VAE, "--seed", "-1"], "--seed: -1 is not a whole number"),
        ([*VAE, "--grid", "4", "16", "0"], "--grid: 0 is not a whole number"),
        ([*VAE, "--dataset_dir", "."], "not allowed with"),
        ([*VAE, "--budget", "5XB"], "'5XB' is not an amount of memory"),
        ([*VAE, "--allow", "anything"], "--allow: invalid choice: 'anything'"),
        ([*VAE, "--grid", "40000", "40000", "40000"], "Memory ran out"),
    ],
)
def test_mistakes_get_one_message(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(ENTRY), *flags, "--output-dir", str(tmp_path)])

    with pytest.raises(SystemExit) as stopped:
        main()

    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_damaged_checkpoint_gets_one_message(tmp_path, monkeypatch, capsys):
    damaged = tmp_path / "vae/last.pt"
    damaged.parent.mkdir()
    damaged.write_text("no checkpoint")
    for flags in ([*VAE, "--resume", "--output-dir", tmp_path], ["--mode", "train_ldm", "--vae_ckpt", damaged]):
        monkeypatch.setattr(sys, "argv", [str(ENTRY), *map(str, flags)])

        with pytest.raises(SystemExit) as stopped:
            main()

        assert stopped.value.code == 2 and f"{damaged} cannot be read: it is damaged" in capsys.readouterr().err


@pytest.fixture
def one_at_a_time(monkeypatch) -> Callable[[Grid, str], tuple[memfit.Step, memfit.Plan]]:
    """The full size's program on a small type; a batch of 8, and a plan of nothing but micro-batches of one that claims an exactness."""
    monkeypatch.setattr(full_size, "make_step", lambda _, batch, grid: make_step("ultra_lightweight", batch, grid))

    def make(grid: Grid, exactness: str) -> tuple[memfit.Step, memfit.Plan]:
        step = full_size.make_step("standard", 8, grid)
        option = LEVERS["microbatch"].options(memfit.profile(step, simulate=True, device="cuda"))[-1]
        row = PlannedLever(option.lever, option.name, exactness, settings=option.settings)
        return step, replace(memfit.plan(step, "64GiB"), levers=(row,), exactness=exactness)

    return make


def test_the_full_sizes_program_in_small_fits_runs_and_proves_on_corners(one_at_a_time):
    grid = (8, 64, 64)
    step, plan = one_at_a_time(grid, "reordered")
    sizes = [replace(step, batch=batch) for batch in (step.batch[:2], corner_of(step.batch))]
    two, corners = (memfit.profile(it, simulate=True).process_high_bytes for it in sizes)
    plan = replace(plan, budget_bytes=(two + corners) // 2)  # where not even two whole samples of the original fit

    verdict = full_size.proven(plan, grid)
    one, fitted = full_size.ran(1, 1, grid=grid), full_size.ran(8, 2, plan, grid)
    rows = full_size.rows_of(memfit.profile(step, simulate=True), [plan], one, [fitted], [verdict])

    assert verdict == "reordered, proven on corners of 2×16×16"
    assert fitted.peak_bytes < 1.2 * one.peak_bytes and fitted.samples == 2  # the batch, and gradients that are added, are what is more
    assert {len(row) for row in rows} == {len(full_size.HEADER)} and rows[2][0].startswith("memfit, batch 8, 2 of its samples run")


def test_a_plan_that_claims_too_much_is_not_proven(one_at_a_time):
    _, plan = one_at_a_time((4, 16, 16), "bitwise")

    assert full_size.proven(plan, (4, 16, 16)) == "bitwise, not the same training"


def test_launch_script_needs_its_word():
    result = subprocess.run(["sh", str(ENTRY.with_name("launch.sh")), "vqe"], capture_output=True, text=True, check=False)

    assert result.returncode == 2 and "vae or ldm" in result.stderr
