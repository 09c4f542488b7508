"""Standard library only. To which class of work an operator of torch, or a kernel of a device, belongs.

Names of operators are torch's own (``aten::...``, also ``c10d::...``); names of kernels are those of cuDNN, cuBLAS, MIOpen,
NCCL, oneDNN and of generated code, as profilers show them. What no rule knows is "other", and its share is reported.
"""

from __future__ import annotations

import re
from typing import Tuple

#: The first rule that matches decides. All names are lower case by then.
_RULES: Tuple[Tuple[str, str], ...] = (
    ("communication", r"nccl|rccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|xccl"),
    ("attention", r"scaled_dot_product|flash|fmha|efficient_attention|attention"),
    ("optimizer", r"_fused_(adam|sgd|adagrad)|optimizer\.step"),
    ("normalisation", r"batch_norm|batchnorm|layer_norm|layernorm|rms_norm|group_norm|bn_(fw|bw)|instance_norm"),
    ("pooling", r"max_pool|avg_pool|pooling|adaptive_.*pool|maxpool|avgpool"),
    ("convolution", r"conv|wgrad|dgrad|fprop|winograd|implicit_gemm|igemm"),
    ("matrix", r"aten::(mm|bmm|addmm|baddbmm|addmv|mv|dot|linear)\b|gemm|cutlass|cublas|matmul|_mm_kernel|nvjet"),
    ("memory", (
        r"copy|clone|memcpy|memset|fill|zero|aten::(cat|stack|contiguous|_to_copy|pad)\b|constant_pad"
        r"|embedding|index|gather|scatter|permute|transpose|nchwto|nhwcto|concat"
    )),
    ("reduction", (
        r"aten::(sum|mean|norm|max|min|argmax|any|all|amax|amin|linalg_vector_norm|_foreach_norm)\b"
        r"|reduce|loss|softmax"
    )),
    ("elementwise", (
        r"aten::(add|sub|mul|div|addc|lerp|sqrt|rsqrt|pow|exp|log|tanh|sigmoid|relu|leaky_relu|gelu|silu"
        r"|threshold|clamp|bernoulli|native_dropout|where|neg|sin|cos|_foreach|rand|eq|ne|gt|lt|abs|hardtanh"
        r"|maximum|minimum|square|reciprocal|isfinite|logical|bitwise|masked)"
        r"|elementwise|vectorized|triton_poi|dropout"
    )),
)  # fmt: skip
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _RULES)

#: Rows of a profile that only mark a span of other rows.
_SPANS = re.compile(
    r"profilerstep|autograd::|torch::|backward\d+$|\#|enumerate\(|cuda[a-z]|hip[a-z]", re.IGNORECASE
)


def class_of(name: str) -> str:
    """Return the class of the operator or kernel *name*."""
    lower = name.lower()
    return next((found for found, pattern in _COMPILED if pattern.search(lower)), "other")


def marks_only(name: str) -> bool:
    """Return whether a row called *name* computes nothing itself, but surrounds, launches or dispatches."""
    return _SPANS.search(name) is not None
