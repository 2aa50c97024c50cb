"""Every technique memfit knows, one file each. Adding one: its file, its maths in ops, one entry here, one doc page."""

from __future__ import annotations

from memfit.levers.attention import Attention
from memfit.levers.lever import CannotApply, Lever
from memfit.levers.outer_product import OuterProduct
from memfit.levers.precision import Precision
from memfit.levers.undo import Undo

__all__ = ["LEVERS", "CannotApply", "Lever", "Undo"]

LEVERS: dict[str, Lever] = {lever.name: lever for lever in (Precision(), OuterProduct(), Attention())}
