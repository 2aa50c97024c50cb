"""Make a PyTorch training step fit a memory budget, and see where every byte goes."""

from memfit.chunking import chunked
from memfit.errors import CannotSimulate, Infeasible, MemfitError, NotEquivalent, StepError
from memfit.fitting import Fitted, fit
from memfit.planning import plan
from memfit.profiling import profile
from memfit.proof import verify
from memfit.records import Ledger, Plan, Verdict
from memfit.step import Phase, Step

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
