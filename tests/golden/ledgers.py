"""Hand-made ledgers: one measured, one predicted, one of a step that took nothing."""

from __future__ import annotations

from memfit.records import CATEGORIES, Finding, Ledger, Owner, Process, Stretch

MIB = 2**20


def hill(ops: int, low: int, high: int) -> list[int]:
    """Bytes that climb from low to high over so many ops."""
    return [low + (high - low) * op // max(ops - 1, 1) for op in range(ops)]


def by_category(owners: tuple[Owner, ...]) -> dict[str, int]:
    """Every category named, as a real ledger has it."""
    return {category: sum(o.bytes for o in owners if o.category == category) for category in CATEGORIES}


def measured() -> Ledger:
    """A generator and a discriminator, with deep module names, loader workers and findings."""
    blocks = "generator.diffusion_model.decoder.up_blocks"
    norm = ("activations", "aten.native_group_norm.default", f"{blocks}.3.resnets.0.norm1", "gan/nets.py:118")
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    owners = (
        *(Owner(24 * MIB, *norm) for _ in range(8)),
        *(Owner(MIB // 64, *norm) for _ in range(8)),
        *(Owner(24 * MIB, "activations", "aten.silu.default", f"{blocks}.3.resnets.0", "gan/nets.py:119") for _ in range(4)),
        Owner(
            66 * MIB,
            "temporaries",
            "aten.convolution_backward.default (workspace)",
            f"{blocks}.3.resnets.1.conv_shortcut.projection",
            "/home/ada/projects/volumes/experiments/2026/gan/networks/residual_blocks.py:204",
        ),
        Owner(60 * MIB, "activations", attention, "generator.mid.attention", "gan/nets.py:77"),
        *(Owner(4 * MIB, "optimizer", "", "AdamW['exp_avg']", "") for _ in range(12)),
        *(Owner(4 * MIB, "optimizer", "", "AdamW['exp_avg_sq']", "") for _ in range(12)),
        *(Owner(4 * MIB, "parameters", "", f"generator.layers.{n}.weight", "") for n in range(12)),
        Owner(16 * MIB, "gradients", "aten.convolution_backward.default", "generator.out", "gan/nets.py:131"),
        Owner(16 * MIB, "activations", "aten.mul.Tensor", "", "gan/losses.py:31"),
        Owner(2 * MIB, "batch", "", "batch['image']", ""),
        Owner(300, "other", "", "generator.running_mean", ""),
    )
    peak = sum(owner.bytes for owner in owners)
    line = [
        *hill(90, 200 * MIB, peak - 80 * MIB),
        *(peak - (op - 20) ** 2 * MIB // 100 for op in range(150)),
        *([170 * MIB] * 400),
        *hill(40, 170 * MIB, 260 * MIB),
        *hill(80, 260 * MIB, 180 * MIB),
        *([175 * MIB] * 120),
    ]
    lengths = (("forward", "generator", 90), ("backward", "generator", 150), ("optimizer", "generator", 400))
    others = (("forward", "discriminator", 40), ("backward", "discriminator", 80), ("optimizer", "discriminator", 120))
    process = Process(301 * MIB, workers_bytes=214 * MIB, workers=2, measured_bytes=301 * MIB + peak + 214 * MIB + 57 * MIB)
    return Ledger(
        peak_bytes=peak,
        process_bytes=process.measured_bytes or 0,
        predicted=False,
        low_bytes=peak,
        high_bytes=peak,
        process_low_bytes=process.measured_bytes or 0,
        process_high_bytes=process.measured_bytes or 0,
        step_seconds=1.432,
        device="cpu",
        batch_size=8,
        by_category=by_category(owners),
        by_module={},
        by_op={},
        by_source={},
        at_peak=owners,
        findings=(
            Finding(
                "frozen_activations",
                16 * MIB,
                "gan/losses.py:31",
                "The loss multiplies the whole image by a mask and keeps the product for backward, although the mask is constant.",
                "saved",
            ),
            Finding(
                "cheap_activations",
                288 * MIB,
                f"{blocks}.3.resnets.0 and 7 more modules",
                "Group norms and SiLUs keep their results for backward; computing them again takes 3 % of the step.",
                "saved",
            ),
            Finding("leak", 3 * MIB, "", "Every step leaves 3.0 MiB behind that nothing frees.", ""),
        ),
        process=process,
        peak_op=110,
        timeline=tuple(line),
        stretches=stretches(lengths + others),
        notes=(),
    )


def stretches(lengths: tuple[tuple[str, str, int], ...]) -> tuple[Stretch, ...]:
    """Phases of losses, one after another."""
    found, first = [], 0
    for phase, loss, ops in lengths:
        found.append(Stretch(phase, loss, first, first + ops - 1))
        first += ops
    return tuple(found)


def predicted() -> Ledger:
    """A language model simulated for a device that is not here."""
    owners = (
        *(Owner(96 * MIB, "activations", "aten._softmax.default", f"h.{n}.attn", "gpt/model.py:64") for n in range(6)),
        *(Owner(96 * MIB, "activations", "aten.native_dropout.default", f"h.{n}.attn", "gpt/model.py:65") for n in range(6)),
        Owner(196 * MIB, "activations", "aten._log_softmax.default", "", "gpt/train.py:22"),
        Owner(196 * MIB, "temporaries", "aten._log_softmax_backward_data.default", "", "gpt/train.py:22"),
        Owner(148 * MIB, "parameters", "", "wte.weight", ""),
        *(Owner(9 * MIB, "parameters", "", f"h.{n}.mlp.c_fc.weight", "") for n in range(6)),
        *(Owner(101 * MIB, "optimizer", "", f"AdamW[{name!r}]", "") for name in ("exp_avg", "exp_avg_sq") for _ in range(2)),
        Owner(64 * 1024, "batch", "", "batch", ""),
    )
    peak = sum(owner.bytes for owner in owners)
    line = [*hill(160, 600 * MIB, peak - 196 * MIB), *hill(3, peak, peak), *hill(300, peak - 196 * MIB, 800 * MIB), *([810 * MIB] * 20)]
    process = Process(480 * MIB, slack_low_bytes=20 * MIB, slack_bytes=60 * MIB, slack_high_bytes=200 * MIB)
    return Ledger(
        peak_bytes=peak,
        process_bytes=peak + 540 * MIB,
        predicted=True,
        low_bytes=peak - 11 * MIB,
        high_bytes=peak + 11 * MIB,
        process_low_bytes=peak + 489 * MIB,
        process_high_bytes=peak + 691 * MIB,
        step_seconds=None,
        device="cuda",
        batch_size=4,
        by_category=by_category(owners),
        by_module={},
        by_op={},
        by_source={},
        at_peak=owners,
        findings=(
            Finding(
                "attention_map",
                1152 * MIB,
                "h.0.attn and 5 more",
                "Attention with dropout keeps two maps of 1024 by 1024 for every head; fused attention keeps none of them.",
                "attention",
            ),
        ),
        process=process,
        peak_op=160,
        timeline=tuple(line),
        stretches=stretches((("forward", "", 160), ("backward", "", 303), ("optimizer", "", 20))),
        notes=(
            "cuda was simulated on fake CPU tensors with cuda's kernels and rounding put in their place; "
            "this is not validated on hardware.",
        ),
    )


def empty() -> Ledger:
    """A step that took no memory and left nothing to tell."""
    none = dict.fromkeys(CATEGORIES, 0)
    return Ledger(0, 0, False, 0, 0, 0, 0, 0.0, "cpu", 1, none, {}, {}, {}, (), (), Process(0, measured_bytes=0), 0, (), (), ())
