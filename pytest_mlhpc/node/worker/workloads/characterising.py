"""PAYLOAD, no torch. The training that a characterisation looks into, and what cannot be asked of one (``characters.py``)."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.worker.workloads.checks import Wrong
from pytest_mlhpc.node.worker.workloads.definitions import Field, Workload

#: The trainings that can be looked into, and those of them whose samples lie in files of their own.
TRAININGS = ("cosmoflow", "deepcam", "resnet50", "language_model")
READ = ("cosmoflow", "deepcam", "resnet50")

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")

#: What a kernel belongs to. The order is that of reports.
CLASSES = (
    "convolution", "matrix", "attention", "normalisation", "pooling", "elementwise", "reduction", "memory",
    "communication", "optimizer", "other",
)  # fmt: skip

#: What a :class:`Field` may be called that the probe sets itself, or that means another mode of running.
_OWN = ("global_batch", "precision", "gradient_accumulation", "until", "bagging", "parallel", "tuning")


def training_of(of: str) -> Workload:
    """Return the training called *of*."""
    from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

    return next(workload for workload in WORKLOADS if workload.name == of)


def inner_fields(values: Mapping[str, Any]) -> Mapping[str, Field]:
    """Return the fields of the training that *values* look into."""
    return training_of(values["of"]).fields


def inner_parameters(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return all fields of the training that *values* (fields of one of our workloads) look into.

    Raises:
        KeyError: there is no such training, size or field.
    """
    from pytest_mlhpc.node.worker.workloads.catalogue import parameters_of

    changes = dict(values.get("fields") or {})
    if "precision" in values:
        changes["precision"] = values["precision"]
    return parameters_of(training_of(values["of"]), values["size"], **changes)


def inner_batch(values: Mapping[str, Any]) -> int:
    """Return the samples of one step on one rank."""
    return int(values.get("batch") or training_of(values["of"]).device_batch)


def _looked_into(values: Mapping[str, Any], accelerator: Optional[str] = None) -> Wrong:
    """Check what is said of the training within, as if it were asked for by itself on one device, an *accelerator*."""
    training, given = training_of(values["of"]), values.get("fields") or {}
    if values["size"] not in training.presets:
        known = ", ".join(training.presets)
        return (("size", f"{values['of']} has no preset {values['size']!r}; it has {known}"),)
    refused = [name for name in given if name in _OWN]
    unknown = [name for name in given if name not in training.fields]
    found = [("fields", f"{name} is not to be set here") for name in refused]
    found += [("fields", f"{values['of']} has no field {name!r}") for name in unknown]
    if found:
        return tuple(found)
    one = {"devices": 1, "nodes": 1, "global_batch": None, "accelerator": accelerator}
    inner = {**inner_parameters(values), **one}
    return tuple(("fields", text) for _, text in training.contradictions(inner))


def _by_torch(values: Mapping[str, Any]) -> Wrong:
    """Refuse devices that torch itself does not compute on: the host's cores would be measured in their name."""
    accelerator = values.get("accelerator")
    if accelerator in ("ipu", "wse"):
        return (("", f"torch computes nothing on {accelerator} by itself, so this would measure the host"),)
    return ()


def wrong_kernels(values: Mapping[str, Any]) -> Wrong:
    """Check a step on one device."""
    return (*_by_torch(values), *_looked_into(values))


def wrong_lowering(values: Mapping[str, Any]) -> Wrong:
    """Check a step that is lowered."""
    accelerator = values.get("accelerator", "wse")
    if accelerator != "wse":
        return (("", f"lowering is for Cerebras' wafers; {accelerator} is none"),)
    found: List[Tuple[str, str]] = list(_looked_into(values))
    if values.get("devices", 1) > 1:
        found.append(("devices", "one process lowers; more would do the same again"))
    if values["precision"] == "tf32":
        found.append(("precision", "a wafer computes in fp32, bf16, fp16, not tf32"))
    return tuple(found)


def wrong_compilation(values: Mapping[str, Any]) -> Wrong:
    """Check a step that is compiled for IPUs, which need not be here."""
    accelerator = values.get("accelerator", "ipu")
    if accelerator not in ("cpu", "ipu"):
        text = f"compilation is for Graphcore's IPUs, from a host with them (ipu) or without (cpu); not {accelerator}"
        return (("", text),)
    found: List[Tuple[str, str]] = list(_looked_into(values, "ipu"))
    if values.get("devices", 1) > 1:
        found.append(("devices", "one process compiles; more would do the same again"))
    return tuple(found)


def wrong_peaks(values: Mapping[str, Any]) -> Wrong:
    """Check the precisions that are asked for."""
    if refused := _by_torch(values):
        return refused
    asked = values["precisions"]
    wrong = [str(one) for one in asked if one not in PRECISIONS]
    if wrong or not asked or len(set(asked)) < len(asked):
        text = f"{list(asked)!r}: name some of {', '.join(PRECISIONS)}, each once"
        return (("precisions", text),)
    return ()


def wrong_gradients(values: Mapping[str, Any]) -> Wrong:
    """Check a step whose gradients are exchanged."""
    found: List[Tuple[str, str]] = list(wrong_kernels(values))
    if values.get("devices", 2) < 2:
        found.append(("devices", "one rank exchanges nothing; at least 2 are needed"))
    return tuple(found)


def wrong_reading(values: Mapping[str, Any]) -> Wrong:
    """Check files that are read."""
    found: List[Tuple[str, str]] = list(_looked_into(values))
    ranks = values.get("devices", 1)
    if values["samples"] < ranks:
        found.append(("samples", f"{values['samples']} samples cannot be shared by {ranks} ranks"))
    from pytest_mlhpc.node.worker.data.layout import FORMATS as OF_WORKLOAD

    form, formats = values["format"], OF_WORKLOAD[values["of"]]
    if form and values["path"]:
        found.append(("format", "is that of a synthetic set; files of path have one already"))
    if form and form not in formats:
        found.append(("format", f"{values['of']} has no format {form!r}; it has {', '.join(formats)}"))
    return tuple(found)
