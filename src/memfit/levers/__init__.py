"""Every technique memfit knows, one file each. Adding one: its file, its maths in ops, an entry here and in settings, one doc page."""

from __future__ import annotations

from memfit.levers.allocator import AllocatorLever
from memfit.levers.architecture import ArchitectureLever
from memfit.levers.attention import Attention
from memfit.levers.chunk import Chunk
from memfit.levers.compile import CompileLever
from memfit.levers.lever import CannotApply, Lever
from memfit.levers.loader import LoaderLever
from memfit.levers.microbatch import MicroBatch
from memfit.levers.optimizer import OptimizerLever
from memfit.levers.outer_product import OuterProduct
from memfit.levers.precision import Precision
from memfit.levers.saved import SavedLever
from memfit.levers.undo import Undo

__all__ = ["LEVERS", "CannotApply", "Lever", "Undo"]

LEVERS: dict[str, Lever] = {
    lever.name: lever
    for lever in (
        SavedLever(),
        MicroBatch(),
        Chunk(),
        Precision(),
        Attention(),
        OuterProduct(),
        OptimizerLever(),
        LoaderLever(),
        AllocatorLever(),
        CompileLever(),
        ArchitectureLever(),
    )
}
