"""Which operators do what, by their names in the trace ("aten.mul.Tensor")."""

from __future__ import annotations

from memfit.records import Op

MATRIX_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum"})
BROADCASTS = frozenset({"mul", "add", "sub", "rsub", "div", "pow", "maximum", "minimum", "where", "addcmul", "addcdiv"})
COPIES = frozenset({"repeat", "clone", "_to_copy", "expand_copy", "repeat_interleave"})
PAIRWISE_DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist", "cdist"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"})


def word(op: Op) -> str:
    """An operator's own name, without its namespace and overload: "mul"."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name
