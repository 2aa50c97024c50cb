"""Which operators do what, by their names in the trace ("aten.mul.Tensor")."""

from __future__ import annotations

from memfit.records import Op

MATRIX_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum"})
PRODUCTS = MATRIX_PRODUCTS | {"mul"}
BROADCASTS = frozenset({"mul", "add", "sub", "rsub", "div", "pow", "maximum", "minimum", "where", "addcmul", "addcdiv"})
COPIES = frozenset({"repeat", "clone", "_to_copy", "expand_copy", "repeat_interleave"})
PAIRWISE_DISTANCES = frozenset({"_cdist_forward", "_euclidean_dist", "cdist"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution"})
LOG_SOFTMAXES = frozenset({"_log_softmax", "_log_softmax_backward_data"})
_NORMS = frozenset({"native_group_norm", "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm"})
_ACTIVATION_FUNCTIONS = frozenset({"relu", "gelu", "silu", "leaky_relu", "elu", "sigmoid", "tanh", "softplus", "hardtanh", "mish"})
_JOINS = frozenset({"cat", "stack", "constant_pad_nd", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"})
CHEAP = _NORMS | _ACTIVATION_FUNCTIONS | _JOINS | BROADCASTS | COPIES  # a pass over memory: seconds that hardly show
FLOAT32_UNDER_AUTOCAST = SOFTMAXES | LOG_SOFTMAXES | _NORMS | {"exp", "log", "pow", "cumsum", "prod", "sum", "norm"}


def word(op: Op) -> str:
    """An operator's own name, without its namespace and overload: "mul"."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name
