"""No torch. Batch, precision, optimizer, seed: what every training needs."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

PRECISIONS = ("fp32", "bf16", "fp16", "tf32")
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "lars")

LOADER_WORKERS = Field(
    None,
    "reading processes of one rank; unset: chosen from its cores",
    minimum=0,
    maximum=1024,  # ours: no node has more cores for one rank, and each takes a process with torch
)


def fields(optimizer: str, learning_rate: float) -> Dict[str, Field]:
    """Return the fields, with this optimizer and learning rate as defaults."""
    return {
        "global_batch": Field(
            None,
            "samples of one step on all ranks; unset: the workload's device_batch times the ranks",
            minimum=1,
        ),
        "precision": Field("fp32", "arithmetic of forward and backward pass", "str", PRECISIONS),
        "optimizer": Field(optimizer, "what updates the weights", "str", OPTIMIZERS),
        "learning_rate": Field(learning_rate, "constant learning rate", "float", minimum=0.0),
        "seed": Field(0, "seed of weights, dropout and order of samples", minimum=0),
        "loader_workers": LOADER_WORKERS,
        "channels_last": Field(
            default=False, help="keep images with the channels last in memory", type="bool"
        ),
        "gradient_accumulation": Field(1, "forward and backward passes to one update", minimum=1),
        "telemetry": Field(
            None,
            "sample processes and devices beside the run, and record cores, memory, power, clocks",
            "bool",
            identity=False,
        ),
    }


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Check probabilities, and that the batch divides evenly."""
    found: List[Tuple[str, str]] = [
        (name, f"{name}={values[name]} is not in [0, 1)")
        for name in ("dropout", "label_smoothing")
        if name in values and not 0 <= values[name] < 1
    ]
    batch, ranks = values.get("global_batch"), values.get("devices", 1)
    parts = ranks * values.get("gradient_accumulation", 1)
    if batch is not None and batch % parts:
        how = f"{ranks} devices x gradient_accumulation={values.get('gradient_accumulation', 1)}"
        found.append(("global_batch", f"global_batch={batch} does not divide over {how}"))
    return tuple(found)


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what every node can tell of itself where it is sampled (``node/telemetry/sidecar.py``)."""
    return ("telemetry_cores", "telemetry_memory", "telemetry_cost") if values.get("telemetry") else ()
