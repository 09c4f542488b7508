"""No torch. Devices that take a training step as one program (ipu, wse), and what they cannot be asked for."""

from __future__ import annotations

from typing import Any, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

FIELDS: Mapping[str, Field] = {}

DEVICES = ("ipu", "wse")

_REFUSED = {
    "until": "trains for a number of steps; until='quality' is for cpu, cuda, rocm and xpu",
    "bagging": "has no groups of ranks; bagging is for cpu, cuda, rocm and xpu",
    "parallel": "shares a model in a way of its own; parallel is for cpu, cuda, rocm and xpu",
    "gradient_compression": "exchanges gradients in a way of its own",
    "bucket_mb": "exchanges gradients in a way of its own",
    "loss_scale": "scales losses in a way of its own",
    "channels_last": "lays tensors out in a way of its own",
}


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse modes and fields that only torch's own training loop has."""
    accelerator = values.get("accelerator")
    if accelerator not in DEVICES:
        return ()
    found = [(name, f"{accelerator} {text}") for name, text in _REFUSED.items() if values.get(name)]
    if accelerator == "wse" and values.get("gradient_accumulation", 1) > 1:
        text = "wse shares a batch by itself where it does not fit; say a global_batch alone"
        found.append(("gradient_accumulation", text))
    return tuple(found)


def expected(_values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Expect nothing more."""
    return ()
