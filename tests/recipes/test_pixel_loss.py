"""The recipe pixel_loss, run as a user would run it, and what it rests on."""

from __future__ import annotations

import csv
import functools
import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import memfit
from memfit.levers import LEVERS
from recipes.pixel_loss import train
from recipes.pixel_loss.data import from_folder
from recipes.pixel_loss.loss import Chunks, whole_loss
from recipes.pixel_loss.model import Decoder, PixelModel, load_decoder, patches, unpatch

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ("--image-size", "32", "--batch-size", "2", "--images", "3")


def run(*flags: str) -> str:
    command = [sys.executable, str(REPOSITORY / "recipes/pixel_loss/train.py"), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def losses(folder: Path) -> list[float]:
    with (folder / "log.csv").open() as file:
        return [float(row["pixel_loss"]) for row in csv.DictReader(file)]


def small_step(batch: int = 3, dtype: torch.dtype = torch.float32, chunks: Chunks | None = None, hand_fix: bool = False) -> memfit.Step:
    """The same decoder, a quarter as wide, on images of 32 × 32."""
    torch.manual_seed(0)
    model = PixelModel(24, Decoder(ch=32, hand_fix=hand_fix)).to(dtype)
    data = {"tokens": torch.randn(batch, 4, 24, dtype=dtype), "images": torch.randn(batch, 3, 32, 32, dtype=dtype)}
    return train.step_of(model, data, chunks, 1e-3)


@functools.cache
def plain_ledger(batch: int = 3) -> memfit.Ledger:
    return memfit.profile(small_step(batch), simulate=True)


def gradients(step: memfit.Step) -> list[torch.Tensor]:
    step.run(step.batch)
    model: Any = step.model
    return [p.grad.clone() for p in model.llm2vae.parameters()]


def furthest(step: memfit.Step, other: memfit.Step) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(gradients(step), gradients(other), strict=True))


def test_a_run_and_one_that_is_resumed_are_the_same(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = run("--data", "synthetic", *TINY, "--epochs", "2", "--output-dir", str(whole))
    assert "llm2vae.weight: grad_norm=" in said and "llm2vae.bias: grad_norm=" in said
    assert "fixed random" in said and "Epoch 2/2 | pixel loss" in said and "PSNR" in said
    run("--data", "synthetic", *TINY, "--epochs", "1", "--output-dir", str(resumed))
    run("--data", "synthetic", *TINY, "--epochs", "2", "--output-dir", str(resumed), "--resume")
    assert losses(whole) == losses(resumed) and len(losses(whole)) == 4
    assert sum(losses(whole)[2:]) < sum(losses(whole)[:2])
    ends = [torch.load(folder / "last.pt", weights_only=True)["llm2vae"]["weight"] for folder in (whole, resumed)]
    assert torch.equal(*ends) and (whole / "epoch_0002.png").stat().st_size > 1000


def test_a_fitted_run_learns_the_same(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures" / "below"
    pictures.mkdir(parents=True)
    for number in range(2):
        Image.effect_mandelbrot((48, 40), (-2, -1.5, 1 - number, 1.5), 40).save(pictures / f"{number}.png")
    flags = ("--data-dir", str(tmp_path / "pictures"), "--image-size", "64", "--batch-size", "2", "--epochs", "1")
    run(*flags, "--output-dir", str(tmp_path / "none"))
    said = run(*flags, "--output-dir", str(tmp_path / "fitted"), "--budget", BUDGET).replace("\n", " ")
    assert "memfit: " in said and "chunk: chunks of 1" in said and "proven" in said
    assert losses(tmp_path / "fitted") == pytest.approx(losses(tmp_path / "none"), rel=1e-5)
    assert "fitted" in torch.load(tmp_path / "fitted/last.pt", weights_only=True)


BUDGET = "900MiB"


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ((), {}, "give --data-dir DIR with pictures, or --data synthetic"),
        (("--data", "synthetic", "--image-size", "100"), {}, "multiple of 16"),
        (("--data", "imagenet"), {}, "invalid choice: 'imagenet'"),
        (("--data-dir", "/nowhere"), {}, "holds no pictures"),
        (("--data", "synthetic"), {"PIXEL_LOSS_CHUNK_SIZE": "0"}, "PIXEL_LOSS_CHUNK_SIZE is '0'"),
        (("--data", "synthetic"), {"PIXEL_LOSS_ADAPTIVE_CHUNK": "maybe"}, "PIXEL_LOSS_ADAPTIVE_CHUNK is 'maybe'"),
        (("--data", "synthetic", "--data-dir", "."), {}, "not allowed with"),
        (("--data", "synthetic", "--lr", "-1"), {}, "--lr: -1 is not a number above 0"),
        (("--data", "synthetic", "--epochs", "0"), {}, "--epochs: 0 is not a whole number from 1 up"),
        (("--data", "synthetic", "--batch-size", "-3"), {}, "--batch-size: -3 is not a whole number"),
        (("--data", "synthetic", "--images", "none"), {}, "--images: none is not a whole number"),
        (("--data", "synthetic", "--image-size", "16000"), {}, "from 32 to 8192"),
        (("--data", "synthetic", "--allow", "anything"), {}, "--allow: invalid choice: 'anything'"),
        (("--data", "synthetic", "--vae", "/nowhere"), {}, "/nowhere is no file"),
        (("--data", "synthetic", "--images", "100000000000"), {}, "memory ran out"),
    ],
)
def test_mistakes_are_told_in_one_message(
    flags: tuple[str, ...], environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    monkeypatch.setattr(train, "Decoder", lambda hand_fix: Decoder(ch=32, hand_fix=hand_fix))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "name"), [("--vae", "ae.safetensors"), ("--vae", "ae.pt"), ("--data-dir", "picture.png")])
def test_a_damaged_file_is_told_by_its_name(flag: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("neither weights nor a picture")
    given = tmp_path / name if flag == "--vae" else tmp_path
    data = ["--data", "synthetic"] if flag == "--vae" else []
    said = refused(*data, flag, str(given), "--image-size", "32", "--output-dir", str(tmp_path / "run"))
    assert f"{name} cannot be read" in said and "Traceback" not in said


def test_a_damaged_checkpoint_and_a_run_that_is_done(tmp_path: Path) -> None:
    flags = ("--data", "synthetic", *TINY, "--epochs", "1", "--output-dir", str(tmp_path))
    run(*flags)
    assert "Nothing is left to do: 1 epochs are done" in run(*flags, "--resume")
    (tmp_path / "last.pt").write_text("no checkpoint")
    assert "last.pt cannot be read: it is damaged" in refused(*flags, "--resume")


def refused(*flags: str) -> str:
    """What the program says on standard error as it ends with exit code 2."""
    command = [sys.executable, str(REPOSITORY / "recipes/pixel_loss/train.py"), *flags]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


class Counting(nn.Module):
    """A decoder that remembers how many images it was given, and has memory for no more than `most`."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.most, self.seen = most, list[int]()

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        if len(z) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        self.seen.append(len(z))
        return z.sin()


def test_the_documented_chunks() -> None:
    z, x, decoder = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), Counting(most=2)
    assert Chunks.from_environment({}) == Chunks(1, False)
    assert Chunks.from_environment({"PIXEL_LOSS_CHUNK_SIZE": "4", "PIXEL_LOSS_ADAPTIVE_CHUNK": "True"}) == Chunks(4, True)
    torch.testing.assert_close(Chunks(2).loss(decoder, z, x), whole_loss(Counting(), z, x), rtol=1e-12, atol=0)
    assert decoder.seen == [2, 2, 1]
    with pytest.raises(RuntimeError, match="can't allocate"):
        Chunks(4).loss(decoder, z, x)
    halving = Chunks(4, adaptive=True)
    torch.testing.assert_close(halving.loss(decoder, z, x), whole_loss(Counting(), z, x), rtol=1e-12, atol=0)
    assert decoder.seen[3:] == [2, 2, 1] and halving.size == 2


def test_the_decoder_is_the_documented_one() -> None:
    with torch.device("meta"):
        decoder = Decoder()
        assert decoder(torch.empty(1, 16, 64, 64)).shape == (1, 3, 512, 512)
    assert sum(p.numel() for p in decoder.parameters()) == 49_545_475
    names = decoder.state_dict().keys()
    assert {
        "conv_in.weight",
        "mid.attn_1.proj_out.bias",
        "up.0.block.0.nin_shortcut.weight",
        "up.3.upsample.conv.bias",
        "norm_out.weight",
    } <= names


def test_latents_are_patches_of_tokens() -> None:
    latents = torch.randn(2, 16, 6, 6)
    assert torch.equal(unpatch(patches(latents), 16), latents)
    assert patches(latents).shape == (2, 9, 64)


def test_weights_from_a_file(tmp_path: Path) -> None:
    saved, loaded = Decoder(ch=32), Decoder(ch=32)
    state = {f"decoder.{name}": tensor for name, tensor in saved.state_dict().items()} | {"encoder.conv_in.weight": torch.ones(3)}
    write_safetensors(tmp_path / "ae.safetensors", state)
    load_decoder(loaded, tmp_path / "ae.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    torch.save({"decoder.conv_in.weight": saved.conv_in.weight}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="does not hold this decoder"):
        load_decoder(loaded, tmp_path / "part.pt")


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    header, data = {}, b""
    for name, tensor in state.items():
        more = tensor.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    words = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(words)) + words + data)


def test_the_hand_fix_gives_the_same_bits_and_only_acts_where_gradients_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, plain = small_step(hand_fix=True), small_step()
    assert all(torch.equal(a, b) for a, b in zip(gradients(fixed), gradients(plain), strict=True))
    monkeypatch.setattr("recipes.pixel_loss.model.checkpoint", None)  # would be called, and fail, if it acted
    model: Any = fixed.model
    with torch.no_grad():
        model.decoder(torch.zeros(1, 16, 4, 4))


@pytest.mark.parametrize("size", [1, 2])
def test_chunks_with_a_backward_of_their_own_are_reordered_only(size: int) -> None:
    chunked, plain = small_step(dtype=torch.float64), small_step(dtype=torch.float64)
    option = LEVERS["chunk"].options(plain_ledger())[0]
    with LEVERS["chunk"].apply(chunked, replace(option, settings={**option.settings, "size": size})):
        assert furthest(chunked, plain) < 1e-10
    assert furthest(small_step(dtype=torch.float64, chunks=Chunks(size)), small_step(dtype=torch.float64)) < 1e-10


def test_a_mean_of_ragged_chunks_that_are_not_weighted_would_be_noticed() -> None:
    plain = small_step(dtype=torch.float64)

    def unweighted(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = zip(model.latents(batch["tokens"]).split(2), batch["images"].split(2), strict=True)
        return torch.stack([whole_loss(model.decoder, z, x) for z, x in parts]).mean()

    assert furthest(replace(small_step(dtype=torch.float64), loss=unweighted), plain) > 1e-3


def test_inputs_that_a_frozen_convolution_never_reads_are_dropped_bit_for_bit() -> None:
    dropped, plain = small_step(), small_step()
    ledger = plain_ledger()
    assert any(finding.kind == "frozen_activations" and "decoder" in finding.where for finding in ledger.findings)
    for option in LEVERS["saved"].options(ledger):
        with LEVERS["saved"].apply(dropped, option):
            assert all(torch.equal(a, b) for a, b in zip(gradients(dropped), gradients(plain), strict=True)), option.name
        dropped, plain = small_step(), small_step()


def test_eight_images_need_little_more_than_one() -> None:
    def peak(batch: int) -> int:
        ledger = plain_ledger(batch)
        return LEVERS["chunk"].rewrite(ledger, LEVERS["chunk"].options(ledger)[-1]).peak_bytes

    assert peak(8) <= 1.1 * peak(1)
    documented = memfit.profile(small_step(8, chunks=Chunks(1)), simulate=True).peak_bytes
    assert documented > 2 * peak(1)  # chunks that wait for one backward keep everything


def test_pictures_from_a_folder(tmp_path: Path) -> None:
    Image.new("L", (20, 60), 255).save(tmp_path / "white.jpg")
    found = from_folder(tmp_path, 32, 10)
    assert found.images.shape == (1, 3, 32, 32) and found.tokens.shape == (1, 4, 10) and float(found.images.min()) > 0.98
