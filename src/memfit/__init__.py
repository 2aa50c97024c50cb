"""Make a PyTorch training step fit a memory budget, and see where every byte goes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit.errors import CannotSimulate, Infeasible, MemfitError, NotEquivalent, StepError
from memfit.records import Ledger, Plan, Verdict

if TYPE_CHECKING:
    from memfit.fitting.fit import Fitted, fit
    from memfit.fitting.planning import plan
    from memfit.profiling import profile
    from memfit.proof import verify
    from memfit.step import Phase, Step
    from memfit.step.chunking import chunked

__all__ = [
    "CannotSimulate",
    "Fitted",
    "Infeasible",
    "Ledger",
    "MemfitError",
    "NotEquivalent",
    "Phase",
    "Plan",
    "Step",
    "StepError",
    "Verdict",
    "chunked",
    "fit",
    "plan",
    "profile",
    "verify",
]

_WITH_TORCH = {
    **{"chunked": "step.chunking", "Fitted": "fitting.fit", "fit": "fitting.fit", "plan": "fitting.planning"},
    **{"profile": "profiling", "verify": "proof", "Phase": "step", "Step": "step"},
}  # where these names are: brought when first asked for, so that records are read, and help is shown, without torch


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
