"""Make a PyTorch training step fit a memory budget, and see where every byte goes."""

from memfit.errors import CannotSimulate, MemfitError, NotEquivalent, StepError
from memfit.profiling import profile
from memfit.proof import verify
from memfit.records import Ledger, Plan, Verdict
from memfit.step import Phase, Step

__all__ = [
    "CannotSimulate",
    "Ledger",
    "MemfitError",
    "NotEquivalent",
    "Phase",
    "Plan",
    "Step",
    "StepError",
    "Verdict",
    "profile",
    "verify",
]
