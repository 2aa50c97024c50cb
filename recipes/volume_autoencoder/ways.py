"""The ways to train the default configuration that are compared, at a size a CPU can run: as it is, by hand, and with memfit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.capture.simulation import built_without_memory
from memfit.fitting.applying import apply_levers, apply_plan
from memfit.levers import LEVERS
from memfit.records import Ledger, PlannedLever
from recipes.kit.measuring import Way
from recipes.volume_autoencoder.config import changed, load_config
from recipes.volume_autoencoder.data import loader_of, sized, sources_in
from recipes.volume_autoencoder.model import build_step
from recipes.volume_autoencoder.train_autoencoder import CONFIGS, made_up, step_of, with_precision

HERE = "recipes.volume_autoencoder.ways"
ORIGINAL, TOGETHER, CHECKPOINT, ON_HOST = "as documented", "all six together", "gradient checkpointing", "host offload (save_on_cpu)"
SMALL: dict[str, Any] = {"name": "default", "voxel_size": (48, 48, 32), "batch_size": 2}
DOCUMENTED: dict[str, Any] = {"name": "default", "voxel_size": (256, 256, 64), "batch_size": 1}
# the guide's ladder, in its order, with the class of each
RUNGS: dict[str, tuple[str, dict[str, Any]]] = {
    "AMP (bfloat16 here)": ("rounded", {"mixed_precision": True}),
    "batch 1, two accumulated": ("altered", {"batch_size": 1, "gradient_accumulation_steps": 2}),
    "no perceptual loss": ("altered", {"use_perceptual_loss": False}),
    "channels [16, 32, 64]": ("altered", {"num_channels": (16, 32, 64)}),
    CHECKPOINT: ("same", {"use_gradient_checkpointing": True}),
    "half the resolution in plane": ("altered", {}),  # of the size at hand
}
SHARES = (0.6, 0.4)  # of what the original's process holds beside interpreter and libraries, asked of memfit
EXACT_LEVERS = ("attention", "saved", "optimizer", "allocator")  # those that are not about a batch of many samples
STEPS = 8  # of equal training


def by_hand(size: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The guide's rungs at some size, each alone and all together."""
    x, y, z = size["voxel_size"]
    more = {name: keys or {"voxel_size": (x // 2, y // 2, z)} for name, (_, keys) in RUNGS.items()}
    together = {key: value for keys in more.values() for key, value in keys.items()}
    return {ORIGINAL: size, **{name: size | keys for name, keys in more.items()}, TOGETHER: size | together}


def simulated() -> Ledger:
    """The original at the small size."""
    return memfit.profile(built_without_memory(lambda: step_of(**SMALL)), simulate=True)


def memfits(plain: Ledger) -> list[Way]:
    """memfit under two budgets, and under the smaller one with rounding. Named by the share: bytes are of this process and this moment."""
    base = plain.process.base_bytes
    budgets = [base + int(share * (plain.process_bytes - base)) for share in SHARES]
    ways = [
        Way(f"memfit, exact, {share:.0%}", f"{HERE}:step_of", SMALL, str(budget)) for share, budget in zip(SHARES, budgets, strict=True)
    ]
    return [*ways, Way(f"memfit, rounded, {SHARES[-1]:.0%}", f"{HERE}:step_of", SMALL, str(budgets[-1]), "rounded")]


def exact_rungs(plain: Ledger) -> list[tuple[Way, str]]:
    """memfit's own techniques one by one, with the class of each: those that take something off the peak or the process here."""
    found = []
    for name in EXACT_LEVERS:
        for option in LEVERS[name].options(plain):
            after = LEVERS[name].rewrite(plain, option)
            if after.peak_bytes < plain.peak_bytes or after.process_high_bytes < plain.process_high_bytes:
                row = PlannedLever(name, option.name, option.exactness, settings=option.settings)
                found.append((Way(f"{name}: {option.name}", f"{HERE}:step_with", {**SMALL, "levers": [row]}), option.exactness))
    return found


def step_with(levers: Sequence[PlannedLever], **keys: Any) -> memfit.Step:
    """A step with some of memfit's techniques on."""
    step = step_of(**keys)
    apply_levers(step, levers)
    return step


def step_on_host(**keys: Any) -> memfit.Step:
    """Host offload as torch offers it: what backward needs waits in the host's memory."""
    step = step_of(**keys)
    step.running.around_loss.append(lambda phase: torch.autograd.graph.save_on_cpu())
    return step


def for_any_batch(name: str, **keys: Any) -> memfit.Step:
    """A step whose batch may be made larger: only where accumulation is asked for is it taken in parts."""
    config = changed(load_config(CONFIGS / f"{name}.yaml"), **keys)
    if config.autoencoder.training.gradient_accumulation_steps > 1:
        return made_up(config)
    torch.manual_seed(0)
    volumes = torch.zeros(config.samples_a_step, 1, *config.voxel_size)
    return with_precision(build_step(changed(config, batch_size=1 << 20), volumes), config)


def learnt(way: Way, data_dir: Path | None) -> str:
    """How far reconstructions are from the volumes, in L1, after equal training on them; to be called in a process of its own."""
    whole = changed(load_config(CONFIGS / "default.yaml"), **{k: v for k, v in SMALL.items() if k != "name"})
    batch = next(iter(loader_of(sources_in(data_dir), whole, torch.Generator().manual_seed(0))))
    config = changed(whole, **{k: v for k, v in way.settings.items() if k != "name"})
    torch.manual_seed(0)
    volumes = sized(batch, config.voxel_size)
    step = with_precision(build_step(config, volumes, learning_rate=5e-4), config)
    if way.budget is not None:
        try:
            apply_plan(step, memfit.plan(step, way.budget, allow=way.allow))
        except memfit.Infeasible:
            return "does not fit"
    torch.manual_seed(1)
    for _ in range(STEPS):
        step.run(volumes)
    with torch.no_grad():
        made = step.models["autoencoder"].reconstruct(volumes)  # type: ignore[operator]
    return f"{(sized(made, whole.voxel_size) - batch).abs().mean():.4f}"
