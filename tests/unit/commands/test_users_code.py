"""Loaders and factories of the user's that raise: exit 2 and their line, never a fault of memfit's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.commands.main import run

FAULTY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import train

class Missing(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        raise ValueError("no such image")

def with_loader(loader, **more):
    step = train.build()
    return train.memfit.Step(step.model, step.loss, step.optimizer, step.batch, loader=loader, **more)

def in_a_worker():
    return with_loader(DataLoader(Missing(), batch_size=3, num_workers=1))

def in_this_process():
    return with_loader(DataLoader(Missing(), batch_size=3))

def without_a_batch():
    return with_loader(DataLoader(TensorDataset(torch.ones(2, 4)), batch_size=3, num_workers=1, drop_last=True))

def failing():
    raise KeyError("no such variant")

def failing_variant():
    return with_loader(None, variants={"small": failing})

def forgetful_variant():
    return with_loader(None, variants={"small": lambda: None})
"""


@pytest.fixture(autouse=True)
def faulty(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (train / "faulty.py").write_text(FAULTY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "faulty.py:in_a_worker", "--simulate"], "its loader failed: faulty.py:11 raised ValueError: no such image\n    raise"),
        (["profile", "faulty.py:in_a_worker"], "its loader failed: faulty.py:11 raised ValueError: no such image\n    raise"),
        (["fit", "faulty.py:in_this_process", "--budget", "16GiB"], "its loader failed: faulty.py:11 raised ValueError: no such image"),
        (
            ["plan", "faulty.py:failing_variant", "--budget", "1MiB", "--allow", "altered"],
            "its variant 'small' failed: faulty.py:27 raised KeyError: 'no such variant'",
        ),
        (["plan", "faulty.py:forgetful_variant", "--budget", "1MiB"], "its variant 'small' returned a NoneType: let the factory return"),
    ],
)
def test_what_the_users_own_code_raises_beside_the_step_is_told_with_their_line(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    err = capfd.readouterr().err
    assert "This step cannot be trained:\n  - " in err and words in err and "Traceback" not in err and "memfit failed" not in err


def test_a_loader_without_a_batch_is_weighed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "faulty.py:without_a_batch", "--simulate", "--json"]) == 0
    process = json.loads(capfd.readouterr().out)["process"]
    assert process["workers"] == 1 and process["waiting_bytes"] == 0  # they end at once
