"""The ways to train it that are measured side by side: the original, what the document proposes, the factored condition."""

from __future__ import annotations

from typing import Any

from recipes.conditional_unet.conditioning import PRESETS


def method(name: str, **more: Any) -> dict[str, Any]:
    """Settings of a step with an optimization method."""
    return {"optimization": {"memory_optimization": True, "optimization_method": name, **more}}


def preset(name: str) -> dict[str, Any]:
    """Settings of a step with a preset."""
    return {"optimization": PRESETS[name]}


def looks_at_values(form: dict[str, Any]) -> bool:
    """`conditional` does: a simulation, which has no values, cannot run it."""
    return bool(form.get("optimization", {}).get("optimization_method") == "conditional")


ORIGINAL = "the original"
BEFORE: dict[str, Any] = {"cemb_mm": False}
FORMS: dict[str, dict[str, Any]] = {
    ORIGINAL: {},
    "before the fix: no cemb_mm": BEFORE,
    "documented: conditional": method("conditional"),
    "documented: low_rank 0.125": method("low_rank"),
    "documented: chunked 8": method("chunked"),
    "documented: use_fp16": {"optimization": {"use_fp16": True}},
    "documented: use_checkpoint": {"optimization": {"use_checkpoint": True}},
    "documented, together without fp16": method("conditional", use_checkpoint=True),
    "documented, together: conservative": preset("conservative"),
    "documented, together: aggressive": preset("aggressive"),
    "factored": method("factored"),
    "factored + use_checkpoint": method("factored", use_checkpoint=True),
}
