"""Workloads that characterise a device or a training, and what cannot be asked of one. No torch."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.protocol.combine import SLOWEST_RANK
from pytest_mlhpc.node.worker.workloads.definitions import ANY_PROBE, Field, Workload
from pytest_mlhpc.node.worker.workloads.fields import LOADER_WORKERS, Wrong
from pytest_mlhpc.node.worker.workloads.trainings import OWN_TRAININGS, parameters_of

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
    return next(workload for workload in OWN_TRAININGS if workload.name == of)


def inner_fields(values: Mapping[str, Any]) -> Mapping[str, Field]:
    """Return the fields of the training that *values* look into."""
    return training_of(values["of"]).fields


def inner_parameters(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return all fields of the training that *values* (fields of one of our workloads) look into.

    Raises:
        KeyError: there is no such training, size or field.
    """
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
    from pytest_mlhpc.node.worker.data.dataset_files import FORMATS as OF_WORKLOAD

    form, formats = values["format"], OF_WORKLOAD[values["of"]]
    if form and values["path"]:
        found.append(("format", "is that of a synthetic set; files of path have one already"))
    if form and form not in formats:
        found.append(("format", f"{values['of']} has no format {form!r}; it has {', '.join(formats)}"))
    return tuple(found)


_HERE = "pytest_mlhpc.node.worker.probes"
_MIB, _GIB = 1 << 20, 1 << 30
_PRESETS = ("smoke", "small", "reference")
_FORMATS = ("", "tfrecord-gzip", "tfrecord", "hdf5", "images")

_READ_RATES = ("read_bandwidth", "sample_bandwidth", "sample_rate", "read_bandwidth_per_process")
#: Metrics of ``kernels`` that each class of kernels has.
_BY_CLASS = ("kernel_share", "kernel_time", "bytes_modelled")

_BATCH = Field(None, "samples of one step on one rank; unset: as many as that training takes", minimum=1)


def _of(choices: Tuple[str, ...]) -> Dict[str, Field]:
    """Return the fields that name a training."""
    return {
        "of": Field(choices[0], "the training that is looked into", "str", choices),
        "size": Field("smoke", "its preset", "str"),
        "fields": Field({}, "fields of that training that differ from its preset", "mapping"),
        "batch": _BATCH,
    }


#: Fields of those that do a training's step on one device.
_STEP = {
    **_of(TRAININGS),
    "precision": Field("fp32", "arithmetic of forward and backward pass", "str", PRECISIONS),
}


def _sizes(steps: int, warmup: int, **by_preset: Tuple[int, int, int]) -> Dict[str, Dict[str, Any]]:
    """Return presets that look into the training's preset of the same name; *by_preset* are values that differ by it."""
    return {
        preset: {
            "size": preset,
            "steps": steps,
            "warmup": warmup,
            **{name: values[place] for name, values in by_preset.items()},
        }
        for place, preset in enumerate(_PRESETS)
    }


def _for_a_cpu_too(presets: Dict[str, Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Return presets that look into nothing larger than ``small``, as a CPU is to compute it in float64 as well."""
    return {**presets, "reference": {**presets["reference"], "size": "small"}}


def _and_slowest(*rates: str) -> Tuple[str, ...]:
    """Return *rates* of all ranks together, and of the slowest rank."""
    return (*rates, *(f"{rate}{SLOWEST_RANK}" for rate in rates))


def _gemms(values: Mapping[str, Any]) -> Tuple[str, ...]:
    return tuple(f"gemm_flops_{precision}" for precision in values["precisions"])


def _character(
    name: str, *, without: Tuple[str, ...] = ("data", "cache"), summary: str, **said: Any
) -> Workload:
    """Return one of them: its probe is called like it and repeated, and it trains and reads no data unless it says so."""
    module = f"{_HERE}.{name}"
    within = {"fields": inner_fields} if "of" in said["fields"] else {}
    reported = (*ANY_PROBE, *said.pop("reported", ()))
    return Workload(
        name,
        summary,
        module,
        reported=reported,
        sample="repetition",
        probe=True,
        without=without,
        within=within,
        **said,
    )


CHARACTERS: Tuple[Workload, ...] = (
    _character(
        "peaks",
        summary="the most that a device computes and moves: products of matrices by precision, copies of its memory",
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
        reported=_and_slowest(
            "copy_bandwidth", "triad_bandwidth", *(f"gemm_flops_{one}" for one in PRECISIONS)
        ),
        expected_of=_gemms,
        contradictions=wrong_peaks,
    ),
    _character(
        "kernels",
        summary="a training step by classes of kernels: time (torch.profiler), operations, bytes moved",
        fields=_STEP,
        presets=_sizes(10, 3),
        judged=("achieved_flops",),
        expected=("step_time", "achieved_flops", "step_flop", "step_bytes_modelled", "profiled_step_time"),
        reported=(
            *_and_slowest("achieved_flops"),
            *("memory_bandwidth_modelled", "memory_bandwidth_counted"),
            *(f"{what}_{kind}" for what in _BY_CLASS for kind in CLASSES),
        ),
        contradictions=wrong_kernels,
    ),
    _character(
        "gradients",
        summary="all-reduce of a training's gradients behind its own backward passes, waiting for late ranks excluded",
        fields={
            **_STEP,
            "bucket": Field(25 * _MIB, "bytes of one message at most (torch's default)", "size", minimum=4),
            "devices_per_node": Field(2, "accelerators of each node, one for each rank", minimum=1),
        },
        presets=_sizes(10, 3),
        judged=("allreduce_bandwidth",),
        expected=("allreduce_bandwidth", "allreduce_bus_bandwidth", "allreduce_wait_time", "gradient_bytes"),
        reported=("allreduce_time", "gradient_time", "gradient_messages"),
        contradictions=wrong_gradients,
    ),
    _character(
        "reading",
        summary="how fast a training's samples are read and unpacked, by each rank and each reading process",
        without=("data",),
        fields={
            **_of(READ),
            "path": Field(
                "", "folder of a data set on the nodes; empty: a synthetic one is made", "str", identity=False
            ),
            "format": Field("", "of the synthetic set; empty: its workload's own", "str", _FORMATS),
            "samples": Field(64, "samples that all ranks read in one repetition, each once", minimum=1),
            "loader_workers": LOADER_WORKERS,
            "cache": Field(
                "warm",
                "state of the page cache before each reading, verified",
                "str",
                ("cold", "warm", "unknown"),
            ),
        },
        presets=_sizes(5, 1, samples=(64, 128, 256)),
        judged=("read_bandwidth",),
        expected=_READ_RATES,
        reported=(*_and_slowest(*_READ_RATES), "read_time", "file_bytes", "reading_processes"),
        contradictions=wrong_reading,
    ),
    _character(
        "lowering",
        summary="a training lowered for Cerebras' wafer, without one: time and operations of the graph",
        fields=_STEP,
        presets=_sizes(1, 0),
        judged=("lowering_time",),
        expected=("lowering_time", "lowered_operations"),
        contradictions=wrong_lowering,
    ),
    _character(
        "compilation",
        summary="a training compiled for Graphcore's IPUs, without one: time, and size of the program; nothing is trained",
        fields=_of(TRAININGS),
        presets=_sizes(1, 0),
        judged=("compile_time",),
        expected=("compile_time", "executable_bytes"),
        contradictions=wrong_compilation,
    ),
    _character(
        "agreement",
        summary="loss and gradients of a training step on a device, compared with those of a CPU in float64",
        fields={
            **_STEP,
            "bound": Field(
                None,
                "largest difference from float64, relative; unset: 4 times that of a CPU in this precision",
                "float",
                minimum=1e-12,
            ),
        },
        presets=_for_a_cpu_too(_sizes(3, 1)),
        judged=(),
        expected=("gradient_time", "loss_error", "gradient_error"),
        contradictions=wrong_kernels,
    ),
)
