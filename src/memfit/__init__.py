"""Make a PyTorch training step fit a memory budget, and see where every byte goes."""

from memfit.chunking import chunked
from memfit.errors import CannotSimulate, MemfitError, StepError
from memfit.profiling import profile
from memfit.records import Ledger
from memfit.step import Phase, Step

__all__ = ["CannotSimulate", "Ledger", "MemfitError", "Phase", "Step", "StepError", "chunked", "profile"]
