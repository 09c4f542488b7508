"""PAYLOAD, no torch. Workloads that characterise a device or a training, apart from all timed training: a table.

They answer why a training is as fast as it is: what the device can do at most (`peaks`), where a training step's time
goes and how much it computes and moves (`kernels`), what exchanging its gradients takes (`gradients`), how fast its samples
can be read (`reading`), whether and how fast it is lowered for a wafer (`lowering`) or compiled for IPUs
(`compilation`), and whether its gradients are right
(`agreement`). Profilers and counters run here alone. ``docs/roofline.md`` says how each figure is made.

A new one is an entry of :data:`CHARACTERS`, the module ``node/worker/probes/NAME.py``, and a row of that page. What its fields
refuse together is said in ``characterising.py``.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from pytest_mlhpc.node.protocol.combine import SLOWEST_RANK
from pytest_mlhpc.node.worker.workloads import characterising as looked_into
from pytest_mlhpc.node.worker.workloads.characterising import CLASSES, PRECISIONS, READ, TRAININGS
from pytest_mlhpc.node.worker.workloads.definitions import ANY_PROBE, Field, Workload
from pytest_mlhpc.node.worker.workloads.fields.basic import LOADER_WORKERS

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
    within = {"fields": looked_into.inner_fields} if "of" in said["fields"] else {}
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
        contradictions=looked_into.wrong_peaks,
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
        contradictions=looked_into.wrong_kernels,
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
        contradictions=looked_into.wrong_gradients,
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
        contradictions=looked_into.wrong_reading,
    ),
    _character(
        "lowering",
        summary="a training lowered for Cerebras' wafer, without one: time and operations of the graph",
        fields=_STEP,
        presets=_sizes(1, 0),
        judged=("lowering_time",),
        expected=("lowering_time", "lowered_operations"),
        contradictions=looked_into.wrong_lowering,
    ),
    _character(
        "compilation",
        summary="a training compiled for Graphcore's IPUs, without one: time, and size of the program; nothing is trained",
        fields=_of(TRAININGS),
        presets=_sizes(1, 0),
        judged=("compile_time",),
        expected=("compile_time", "executable_bytes"),
        contradictions=looked_into.wrong_compilation,
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
        contradictions=looked_into.wrong_kernels,
    ),
)
