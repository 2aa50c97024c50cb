"""Which operators autocast runs in half precision, which in float32, and how to tell composite ones in a trace."""

from __future__ import annotations

from memfit.records import Op, Trace

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention"
)
_WEIGHTED = "mm bmm addmm baddbmm addbmm convolution _convolution linear matmul _addmm_activation linalg_vecdot _prelu_kernel"
LOWERED = frozenset(f"{_WEIGHTED} {_ATTENTION}".split())
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss nll_loss_forward nll_loss2d_forward binary_cross_entropy "
    "binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss multilabel_margin_loss_forward _ctc_loss"
)
KEPT_ON_CPU = frozenset(
    f"{_LOSSES} avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d grid_sampler_2d grid_sampler_3d prod "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d _cdist_forward".split()
)
_UPSAMPLING = " ".join(f"upsample_{way}d" for way in ("nearest1", "nearest2", "nearest3", "linear1", "bilinear2", "bicubic2", "trilinear3"))
_POWERS = "pow exp expm1 log log1p log2 log10 rsqrt reciprocal sum prod cumsum cumprod linalg_vector_norm softplus cosh sinh tan acos asin"
_NORMS = "_softmax _log_softmax native_layer_norm native_group_norm grid_sampler_2d grid_sampler_3d _cdist_forward"
KEPT_ON_CUDA = frozenset(f"{_LOSSES} {_NORMS} {_POWERS} {_UPSAMPLING}".split())
_SCALING = frozenset({"mul", "transpose"})
JOINED = frozenset({"cat", "stack", "index_copy"})
FIRST_OUTPUT_ONLY = ("native_", "_native_batch_norm", "_scaled_dot_product", "_fused_rms_norm", "cudnn_batch_norm")


def word(op: Op) -> str:
    """An operator's own name, without its namespace and overload: "mul"."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def written_out_attention(trace: Trace) -> list[set[int]]:
    """Ops of scaled_dot_product_attention where torch has no fused kernel: it takes half inputs, computes in float32 and gives half."""
    found = []
    for number, op in enumerate(trace.ops):
        if op.phase == "forward" and word(op) == "_safe_softmax":
            first = last = number
            while first and word(trace.ops[first - 1]) != "mul" and trace.ops[first - 1].module == op.module:
                first -= 1
            while first and word(trace.ops[first - 1]) in _SCALING:
                first -= 1
            while last + 1 < len(trace.ops) and word(trace.ops[last]) != "bmm":
                last += 1
            found.append(set(range(first, last + 1)))
    return found


def outermost_calls(trace: Trace) -> list[int]:
    """For each op the number of the outermost module call it ran in, -1 outside of all."""
    inside = [-1] * len(trace.ops)
    for call in sorted(trace.calls, key=lambda call: (call.first, -call.last)):
        if inside[call.first] < 0:
            inside[call.first : call.last + 1] = [call.first] * (call.last + 1 - call.first)
    return inside


def adds_bias_of_linear(trace: Trace, number: int) -> bool:
    """A linear layer on more than two dimensions may come as t, mm, view, add; autocast casts its bias as well."""
    op = trace.ops[number]
    if word(op) != "add" or number < 2 or len(op.inputs) != 2 or trace.storages[op.inputs[1]].kind != "parameters":
        return False
    product = next((trace.ops[n] for n in (number - 1, number - 2) if word(trace.ops[n]) in ("mm", "bmm")), None)
    if product is None or product.outputs[0] != op.inputs[0]:
        return False
    turned = {s for n in range(max(0, number - 8), number) if word(trace.ops[n]) == "t" for s in trace.ops[n].inputs}
    return bool(turned & set(product.inputs))


def as_cast(op: Op) -> tuple[int, ...]:
    """An op's inputs in the order in which autocast casts them: torch's compilers evaluate arguments from the last to the first.

    A linear layer's are input, weight and bias, though its addmm has the bias in front; what is joined is a list, taken as it comes.

    >>> as_cast(Op("aten.addmm.default", "forward", "", "", "", (7, 8, 9), ()))
    (7, 9, 8)
    """
    if word(op) in JOINED:
        return op.inputs
    return (op.inputs[0], *op.inputs[:0:-1]) if word(op) == "addmm" else op.inputs[::-1]


def is_cross_entropy(trace: Trace, number: int) -> bool:
    """Log-softmax right before its loss: autocast keeps the two together in float32."""
    following = trace.ops[number + 1 : number + 3]
    return word(trace.ops[number]) == "_log_softmax" and any(word(op).startswith("nll_loss") for op in following)
