"""PAYLOAD, no torch. Workloads that characterise a device or a training, apart from all timed training.

They answer why a training is as fast as it is: what the device can do at most (`peaks`), where a training step's time
goes and how much it computes and moves (`kernels`), what exchanging its gradients takes (`gradients`), how fast its samples
can be read (`reading`), whether and how fast it is lowered for a wafer (`lowering`). Profilers and counters run here alone. ``docs/roofline.md`` says how each figure is made.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.worker.workloads.definitions import Field, Workload

_HERE = "pytest_mlhpc.worker.probes"
_MIB, _GIB = 1 << 20, 1 << 30

#: The trainings that can be looked into, and those of them whose samples lie in files of their own.
TRAININGS = ("cosmoflow", "deepcam", "resnet50", "language_model")
READ = ("cosmoflow", "deepcam", "resnet50")

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
FORMATS = ("", "tfrecord-gzip", "tfrecord", "hdf5", "images")

#: What a kernel belongs to. The order is that of reports.
CLASSES = (
    "convolution", "matrix", "attention", "normalisation", "pooling", "elementwise", "reduction", "memory",
    "communication", "optimizer", "other",
)  # fmt: skip

#: What a :class:`Field` may be called that the probe sets itself, or that means another mode of running.
_OWN = ("global_batch", "precision", "gradient_accumulation", "until", "bagging", "parallel", "tuning")

Wrong = Tuple[Tuple[str, str], ...]


def training_of(of: str) -> Workload:
    """Return the training called *of*."""
    from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS

    return next(workload for workload in WORKLOADS if workload.name == of)


def inner_parameters(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return all fields of the training that *values* (fields of one of our workloads) look into.

    Raises:
        KeyError: there is no such training, size or field.
    """
    from pytest_mlhpc.worker.workloads.catalogue import parameters_of

    changes = dict(values.get("fields") or {})
    if "precision" in values:
        changes["precision"] = values["precision"]
    return parameters_of(training_of(values["of"]), values["size"], **changes)


def inner_batch(values: Mapping[str, Any]) -> int:
    """Return the samples of one step on one rank."""
    return int(values.get("batch") or training_of(values["of"]).device_batch)


def _looked_into(values: Mapping[str, Any]) -> Wrong:
    """Check what is said of the training within, as if it were asked for by itself on one device."""
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
    inner = {**inner_parameters(values), "devices": 1, "nodes": 1, "global_batch": None}
    return tuple(("fields", text) for _, text in training.contradictions(inner))


def _by_torch(values: Mapping[str, Any]) -> Wrong:
    """Refuse devices that torch itself does not compute on: the host's cores would be measured in their name."""
    accelerator = values.get("accelerator")
    if accelerator in ("ipu", "wse"):
        return (("", f"torch computes nothing on {accelerator} by itself, so this would measure the host"),)
    return ()


def _kernels(values: Mapping[str, Any]) -> Wrong:
    return (*_by_torch(values), *_looked_into(values))


def _lowering(values: Mapping[str, Any]) -> Wrong:
    accelerator = values.get("accelerator", "wse")
    if accelerator != "wse":
        return (("", f"lowering is for Cerebras' wafers; {accelerator} is none"),)
    found: List[Tuple[str, str]] = list(_looked_into(values))
    if values.get("devices", 1) > 1:
        found.append(("devices", "one process lowers; more would do the same again"))
    if values["precision"] == "tf32":
        found.append(("precision", "a wafer computes in fp32, bf16, fp16, not tf32"))
    return tuple(found)


def _peaks(values: Mapping[str, Any]) -> Wrong:
    if refused := _by_torch(values):
        return refused
    asked = values["precisions"]
    wrong = [str(one) for one in asked if one not in PRECISIONS]
    if wrong or not asked or len(set(asked)) < len(asked):
        text = f"{list(asked)!r}: name some of {', '.join(PRECISIONS)}, each once"
        return (("precisions", text),)
    return ()


def _gradients(values: Mapping[str, Any]) -> Wrong:
    found: List[Tuple[str, str]] = list(_kernels(values))
    if values.get("devices", 2) < 2:
        found.append(("devices", "one rank exchanges nothing; at least 2 are needed"))
    return tuple(found)


def _reading(values: Mapping[str, Any]) -> Wrong:
    found: List[Tuple[str, str]] = list(_looked_into(values))
    ranks = values.get("devices", 1)
    if values["samples"] < ranks:
        found.append(("samples", f"{values['samples']} samples cannot be shared by {ranks} ranks"))
    from pytest_mlhpc.worker.data.layout import FORMATS as OF_WORKLOAD

    form, formats = values["format"], OF_WORKLOAD[values["of"]]
    if form and form not in formats:
        found.append(("format", f"{values['of']} has no format {form!r}; it has {', '.join(formats)}"))
    return tuple(found)


def _gemms(values: Mapping[str, Any]) -> Tuple[str, ...]:
    return tuple(f"gemm_flops_{precision}" for precision in values["precisions"])


def _of(choices: Tuple[str, ...]) -> Dict[str, Field]:
    """Return the fields that name a training."""
    return {
        "of": Field(choices[0], "the training that is looked into", "str", choices),
        "size": Field("smoke", "its preset", "str"),
        "fields": Field({}, "fields of that training that differ from its preset", "mapping"),
    }


_SIZES = {"smoke": "smoke", "small": "small", "reference": "reference"}

_BATCH = Field(None, "samples of one step on one rank; unset: as many as that training takes", minimum=1)
_PRECISION = Field("fp32", "arithmetic of forward and backward pass", "str", PRECISIONS)


def _presets(steps: int, warmup: int, **more: Any) -> Dict[str, Dict[str, Any]]:
    return {name: {"size": size, "steps": steps, "warmup": warmup, **more} for name, size in _SIZES.items()}


PEAKS = Workload(
    name="peaks",
    summary="the most that a device computes and moves: products of matrices by precision, copies of its memory",
    module=f"{_HERE}.peaks",
    fields={
        "precisions": Field(["fp32", "bf16"], f"some of {', '.join(PRECISIONS)}", "list"),
        "matrix": Field(8192, "rows and columns of the matrices", minimum=64),
        "vector": Field(_GIB, "bytes of each vector that is copied", "size", minimum=4096),
    },
    presets={
        "smoke": {"matrix": 1024, "vector": 64 * _MIB, "steps": 10, "warmup": 3},
        "small": {"matrix": 4096, "vector": 256 * _MIB, "steps": 15, "warmup": 5},
        "reference": {"matrix": 8192, "vector": _GIB, "steps": 30, "warmup": 10},
    },
    judged=("copy_bandwidth",),
    expected=("copy_bandwidth", "triad_bandwidth"),
    expected_of=_gemms,
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_peaks,
)

KERNELS = Workload(
    name="kernels",
    summary="a training step by classes of kernels: time (torch.profiler), operations, bytes moved",
    module=f"{_HERE}.kernels",
    fields={**_of(TRAININGS), "precision": _PRECISION, "batch": _BATCH},
    presets=_presets(10, 3),
    judged=("achieved_flops",),
    expected=("step_time", "achieved_flops", "step_flop", "step_bytes_modelled", "profiled_step_time"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_kernels,
)

GRADIENTS = Workload(
    name="gradients",
    summary="all-reduce of a training's gradients behind its own backward passes, waiting for late ranks excluded",
    module=f"{_HERE}.gradients",
    fields={
        **_of(TRAININGS),
        "precision": _PRECISION,
        "batch": _BATCH,
        "bucket": Field(25 * _MIB, "bytes of one message at most (torch's default)", "size", minimum=4),
        "devices": Field(2, "accelerators of the run, one for each rank", minimum=1),
    },
    presets=_presets(10, 3),
    judged=("allreduce_bandwidth",),
    expected=("allreduce_bandwidth", "allreduce_bus_bandwidth", "allreduce_wait_time", "gradient_bytes"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_gradients,
)

READING = Workload(
    name="reading",
    summary="how fast a training's samples are read and unpacked, by each rank and each reading process",
    module=f"{_HERE}.reading",
    fields={
        **_of(READ),
        "path": Field(
            "", "folder of a data set on the nodes; empty: a synthetic one is made", "str", identity=False
        ),
        "format": Field("", "of the synthetic set; empty: its workload's own", "str", FORMATS),
        "samples": Field(64, "samples that all ranks read in one repetition, each once", minimum=1),
        "loader_workers": Field(
            None, "reading processes of one rank; unset: chosen from its cores", minimum=0
        ),
        "batch": _BATCH,
        "cache": Field(
            "warm",
            "state of the page cache before each reading, verified",
            "str",
            ("cold", "warm", "unknown"),
        ),
    },
    presets={
        "smoke": {"size": "smoke", "samples": 64, "steps": 5, "warmup": 1},
        "small": {"size": "small", "samples": 128, "steps": 5, "warmup": 1},
        "reference": {"size": "reference", "samples": 256, "steps": 5, "warmup": 1},
    },
    judged=("read_bandwidth",),
    expected=("read_bandwidth", "sample_bandwidth", "sample_rate", "read_bandwidth_per_process"),
    sample="repetition",
    probe=True,
    without=("data",),
    contradictions=_reading,
)

LOWERING = Workload(
    name="lowering",
    summary="a training lowered for Cerebras' wafer, without one: time and operations of the graph",
    module=f"{_HERE}.lowering",
    fields={**_of(TRAININGS), "precision": _PRECISION, "batch": _BATCH},
    presets=_presets(1, 0),
    judged=("lowering_time",),
    expected=("lowering_time", "lowered_operations"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_lowering,
)

AGREEMENT = Workload(
    name="agreement",
    summary="loss and gradients of a training step on a device, compared with those of a CPU in float64",
    module=f"{_HERE}.agreement",
    fields={
        **_of(TRAININGS),
        "precision": _PRECISION,
        "batch": _BATCH,
        "bound": Field(
            None,
            "largest difference from float64, relative; unset: 4 times that of a CPU in this precision",
            "float",
            minimum=1e-12,
        ),
    },
    presets=_presets(3, 1),
    judged=(),
    expected=("gradient_time", "loss_error", "gradient_error"),
    sample="repetition",
    probe=True,
    without=("data", "cache"),
    contradictions=_kernels,
)

CHARACTERS: Tuple[Workload, ...] = (PEAKS, KERNELS, GRADIENTS, READING, LOWERING, AGREEMENT)
