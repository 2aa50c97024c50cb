"""Memory that an operator takes inside itself, which fake tensors cannot see: measured once per op and shape, then remembered."""

from memfit.capture.workspaces.collected import OpBytes, Workspaces

__all__ = ["OpBytes", "Workspaces"]
