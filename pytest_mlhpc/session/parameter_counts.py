"""How many parameters a model has, from its fields alone: no torch, which the machine that submits may not have.

Each function repeats what the workload's module builds; tests compare them with the models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

#: Channels and outputs of CosmoFlow (node/worker/workloads/cosmoflow.py) and DeepCAM (node/worker/workloads/deepcam.py).
_COSMOFLOW, _DEEPCAM_IN, _DEEPCAM_OUT = 4, 16, 3
_BOTTLENECKS, _EXPANSION = (3, 4, 6, 3), 4  #: of ResNet-50

Values = Mapping[str, Any]


def parameter_count(workload: str, values: Values) -> int | None:
    """Return the number of parameters of *workload* with these effective fields, None where it is not known."""
    count = _COUNTS.get(workload)
    return None if count is None else count(values)


def _language_model(values: Values) -> int:
    llama, hidden, heads = values["architecture"] == "llama", values["hidden"], values["heads"]
    shared = (values["kv_heads"] or heads) * (hidden // heads)
    ffn = values["ffn"] or (hidden * 7 // 2 if llama else hidden * 4)
    table = values["vocabulary"] * hidden
    attention = hidden * (hidden + 2 * shared) + hidden * hidden
    if llama:
        block = 2 * hidden + attention + 3 * hidden * ffn
        return int(2 * table + values["layers"] * block + hidden)
    biases = hidden + 2 * shared + hidden + ffn + hidden
    block = 4 * hidden + attention + 2 * hidden * ffn + biases
    return int(table + values["context"] * hidden + values["layers"] * block + 2 * hidden)


def _cosmoflow(values: Values) -> int:
    channels, total = _COSMOFLOW, 0
    for layer in range(values["layers"]):
        filters = values["base_channels"] * 2**layer
        total += (channels * values["kernel_size"] ** 3 + 1) * filters
        channels = filters
    volume = channels * (values["input_size"] >> values["layers"]) ** 3
    return int(total + (volume + 1) * 128 + 129 * 64 + 65 * _COSMOFLOW)


def _normalised(inner: int, outer: int, kernel: int = 1) -> int:
    """Count a convolution without bias and the batch normalisation behind it."""
    return inner * outer * kernel**2 + 2 * outer


def _resnet50(values: Values) -> int:
    channels = 64
    total = _normalised(3, channels, 7 if values["stem"] == "v1.5" else 3)
    for stage, repeats in enumerate(_BOTTLENECKS):
        inner = 64 * 2**stage
        outer = inner * _EXPANSION
        for _ in range(repeats):
            total += _normalised(channels, inner) + _normalised(inner, inner, 3) + _normalised(inner, outer)
            total += _normalised(channels, outer) if channels != outer else 0
            channels = outer
    return int(total + (channels + 1) * values["classes"])


def _separable(inner: int, outer: int) -> int:
    return 9 * inner + inner * outer


def _xblock(*widths: int, last: bool = True, shortcut: bool = True) -> int:
    """Count the separable convolutions between *widths*, the one behind them (*last*), and the shortcut's."""
    body = sum(_separable(inner, outer) + 2 * outer for inner, outer in pairwise(widths))
    end = widths[-1]
    return body + (_separable(end, end) if last else 0) + (_normalised(widths[0], end) if shortcut else 0)


def _deepcam(values: Values) -> int:
    def wide(channels: int) -> int:
        return max(1, round(channels * float(values["width_multiplier"])))

    c32, c48, c64, c128, c256, c728, c1024, c1536, c2048 = map(
        wide, (32, 48, 64, 128, 256, 728, 1024, 1536, 2048)
    )
    entry = _normalised(_DEEPCAM_IN, c32, 3) + _normalised(c32, c64, 3) + _xblock(c64, c128, c128)
    flow = _xblock(c128, c256, c256) + _xblock(c256, c728, c728)
    flow += values["middle_blocks"] * _xblock(c728, c728, c728, c728, last=False, shortcut=False)
    flow += _xblock(c728, c728, c1024, shortcut=c728 != c1024)
    for inner, outer in ((c1024, c1536), (c1536, c1536), (c1536, c2048)):
        flow += _separable(inner, outer) + 2 * outer
    pyramid = _normalised(c2048, c256) + 3 * _normalised(c2048, c256, 3)
    pyramid += c2048 * c256 + 2 * c256 + _normalised(5 * c256, c256)
    decoder = _normalised(c128, c48) + 2 * _normalised(c256, c256, 3)
    decoder += _normalised(c256 + c48, c256, 3) + _normalised(c256, c256, 3) + c256 * c256 + c256
    decoder += _normalised(c256, c256, 3) + 9 * c256 * _DEEPCAM_OUT
    return int(entry + flow + pyramid + decoder)


_COUNTS: Mapping[str, Callable[[Values], int]] = {
    "language_model": _language_model,
    "cosmoflow": _cosmoflow,
    "resnet50": _resnet50,
    "deepcam": _deepcam,
}
