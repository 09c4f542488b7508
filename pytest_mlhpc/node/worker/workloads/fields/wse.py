"""No torch. Cerebras: on how many systems, or on the CPU back-end of its package. All unset by default."""

from __future__ import annotations

from typing import Any, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

FIELDS: Mapping[str, Field] = {
    "csx": Field(None, "wse only: Cerebras systems of the run, all driven by its one rank; unset: 1", minimum=1),
    "cerebras": Field(
        None, "wse only: cpu trains on the CPU back-end of Cerebras' package; unset: on the cluster", "str", ("cpu",)
    ),
}  # fmt: skip

#: Optimizers that cerebras.pytorch 2.10 has of its own.
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb")


def wrong(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Refuse what is not for this device, and what this device cannot do."""
    accelerator = values.get("accelerator")
    if accelerator is None:
        return ()
    if accelerator != "wse":
        asked = [name for name in FIELDS if values.get(name) is not None]
        return tuple((name, f"{name} is for Cerebras systems; {accelerator} is none") for name in asked)
    found: List[Tuple[str, str]] = []
    if values.get("devices", 1) > 1:
        found.append(("devices", "one rank drives all Cerebras systems of a run: say csx=2 instead"))
    if values.get("optimizer", OPTIMIZERS[0]) not in OPTIMIZERS:
        found.append(
            ("optimizer", f"cerebras.pytorch has {', '.join(OPTIMIZERS)}, not {values['optimizer']}")
        )
    on_cpu = values.get("cerebras") == "cpu"
    if on_cpu and values.get("csx") is not None:
        found.append(("csx", "the CPU back-end has no systems"))
    batch, systems = values.get("global_batch"), values.get("csx") or 1
    if batch is not None and batch % systems:
        found.append(("global_batch", f"global_batch={batch} does not divide over csx={systems} systems"))
    precisions = ("fp32", "bf16") if on_cpu else ("fp32", "bf16", "fp16")
    if values.get("precision", "fp32") not in precisions:
        where = "its CPU back-end" if on_cpu else "a wafer"
        found.append(("precision", f"{where} computes in {', '.join(precisions)}, not {values['precision']}"))
    if values.get("data") == "device":
        found.append(("data", "samples are streamed to the wafer, none lie there; use memory or files"))
    return tuple(found)


def expected(_values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Expect nothing more."""
    return ()
