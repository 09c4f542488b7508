"""Published throughputs of our workloads, and what must be equal for two throughputs to stand in one section of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_mlhpc.node.worker.workloads.fields.arithmetic import MANNER
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import RecordedRun

SAME, BEST = "same", "best"
PARITIES: Final = {
    SAME: "same parameters: each section holds runs of one model, data, batch, precision and optimizer",
    BEST: "each at its best: one model and data; batch, precision, optimizer and layout are each machine's own",
}
#: What a site may tune without training another model on other data (closed division of MLPerf HPC, and what only this
#: machine's arithmetic and memory care for). All other fields belong to the model.
TUNING: Final = frozenset(
    {
        "global_batch", "precision", "optimizer", "learning_rate", "seed", "loader_workers", "channels_last",
        "gradient_accumulation", "tuning", "loss_scale", *MANNER,
    }
)  # fmt: skip
#: Fields of a definition that never put runs apart here: how long a run is, and how large, which has a line of its own.
_FREE: Final = frozenset({*keys.LENGTH, *keys.SCALE})
#: The definition's ``cache`` is what was asked for; the terms have what was measured.
_MEASURED: Final = "cache"


@dataclass(frozen=True)
class SharedTerms:
    """What all figures of one section share. ``fields`` are (name, value), sorted."""

    workload: str
    fields: tuple[tuple[str, str], ...]
    data_kind: str
    cache: str

    def __str__(self) -> str:
        """Return it for people."""
        return self.without({})

    def without(self, shared: Mapping[str, str]) -> str:
        """Return it for people who know of the fields in *shared* already."""
        said = [f"{name}={value}" for name, value in self.fields if name not in shared]
        remarks = [f"{self.data_kind} data"] if self.data_kind not in ("", "none") else []
        remarks += [f"{self.cache} cache"] if self.cache not in ("", "unknown") else []
        return ", ".join([" ".join([self.workload, *said]), *remarks])

    def sort_key(self) -> list[tuple[int, int, str]]:
        """Return what puts 4 before 16."""
        return keys.natural(str(self))


def shared(sections: Sequence[SharedTerms]) -> dict[str, str]:
    """Return the fields that have one value in all of *sections*."""
    first, *others = [dict(terms.fields) for terms in sections]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def terms_of(key: keys.Key, run: RecordedRun, parity: str) -> SharedTerms:
    """Return what a figure of *run* has in common with those it may be compared with."""
    free = _FREE | TUNING if parity == BEST else _FREE
    fields = {
        name: keys.shown(value)
        for name, value in key.fields.items()
        if name not in free and name != _MEASURED
    }
    return SharedTerms(key.workload, tuple(sorted(fields.items())), run.data_kind, run.cache)


def tuned(key: keys.Key) -> dict[str, str]:
    """Return the fields of *key* that a site may tune."""
    return {name: keys.shown(value) for name, value in sorted(key.identity.items()) if name in TUNING}


def differences(wanted: SharedTerms, other: SharedTerms) -> list[str]:
    """Return why *other* is not comparable with *wanted*, of the same workload: ``global_batch=64 (not 32)``."""
    mine, theirs = dict(wanted.fields), dict(other.fields)
    found = [
        f"{name}={theirs.get(name, 'unset')} (not {mine.get(name, 'unset')})"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    if wanted.data_kind != other.data_kind:
        found.append(f"{other.data_kind or 'no'} data (not {wanted.data_kind or 'none'})")
    if wanted.cache != other.cache:
        found.append(f"{other.cache} cache (not {wanted.cache})")
    return found


#: Sources, by the names that figures use.
SOURCES: Final[Mapping[str, str]] = {
    "hpdc24": (
        "Rae, Lee, Richings, Weiland: Benchmarking Machine Learning Applications on Heterogeneous Architecture using ReFrame,"
        " HPDC'24, doi 10.1145/3625549.3658896; ResNet-50 with the stem of their code; fp32 where it names no other precision"
    ),
    "sc21": "MLPerf HPC v0.7, the paper of the MLHPC workshop at SC'21: rates of training per device",
    "mlperf-hpc-0.7": "logs of MLPerf HPC v0.7: samples / median training epoch / devices, worked out from them",
    "mlperf-hpc": "logs of MLPerf HPC v1.0 to v3.0: samples / median training epoch / devices, worked out from them",
    "nvidia": "NVIDIA/DeepLearningExamples, ResNet-50 v1.5 for PyTorch: tables of its README",
    "cscs": "eth-cscs/cscs-reframe-tests: reference values, which a system may miss by 10 %",
}
#: The models as these sources ran them.
COSMOFLOW: Final = {"kernel_size": "3", "input_size": "128", "layers": "5", "base_channels": "32"}
COSMOFLOW_07: Final = {**COSMOFLOW, "kernel_size": "2"}
DEEPCAM: Final = {"height": "768", "width": "1152", "width_multiplier": "1", "middle_blocks": "16"}
RESNET50: Final = {"stem": "v1.5", "image_size": "224"}
RESNET50_EPCC: Final = {**RESNET50, "stem": "epcc"}
_GRAPHCORE: Final = "EIDF, Graphcore Bow IPU"
#: The paper says of one run that it was in half precision; of all others it is taken that they were in PyTorch's default.
_PRECISIONS: Final = {(_GRAPHCORE, "cosmoflow"): {"precision": "fp16"}}
_MODELS: Final = {"resnet50": RESNET50_EPCC, "cosmoflow": COSMOFLOW, "deepcam": DEEPCAM}


@dataclass(frozen=True)
class Published:
    """What a source says of one workload on one system.

    ``compute``, ``fraction`` and ``effective`` are of the whole run, in samples/s and 1; ``per_device`` is the effective
    throughput where the source has no other. ``tuning`` holds what is known of it. ``note`` says what is odd.
    """

    source: str
    system: str
    workload: str
    model: Mapping[str, str]
    devices: int | None = None
    nodes: int | None = None
    compute: float | None = None
    fraction: float | None = None
    effective: float | None = None
    per_device: float | None = None
    data_kind: str = "real"
    tuning: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def apart(self, terms: SharedTerms, parity: str) -> list[str]:
        """Return why it is not comparable with figures of ours that share *terms*; nothing where it is."""
        ours = dict(terms.fields)
        wanted = {**self.model, **(self.tuning if parity == SAME else {})}
        found = [
            f"{name}={value} (not {ours.get(name, 'unset')})"
            for name, value in sorted(wanted.items())
            if ours.get(name) != value
        ]
        if parity == SAME and "global_batch" not in self.tuning:
            found.append("global_batch not stated")
        if self.data_kind != terms.data_kind:
            found.append(f"{self.data_kind} data (not {terms.data_kind or 'none'})")
        if terms.cache not in ("", "unknown"):
            found.append(f"state of the cache not stated (not {terms.cache})")
        return found


def _hpdc24(
    system: str,
    nodes: int | None,
    devices: int,
    figures: Mapping[str, tuple[float | None, float | None, float]],
    *,
    notes: Mapping[str, str] | None = None,
) -> tuple[Published, ...]:
    """Return one system of the paper's tables 2 to 4. Global batch 32 everywhere."""
    return tuple(
        Published(
            "hpdc24", system, workload, _MODELS[workload], devices, nodes, compute, fraction, effective,
            tuning={"global_batch": "32", **_PRECISIONS.get((system, workload), {"precision": "fp32"})}, note=(notes or {}).get(workload, ""),
        )
        for workload, (compute, fraction, effective) in figures.items()
    )  # fmt: skip


_ONE_SYNCHRONISATION: Final = "EPCC's public code exchanges DeepCAM's gradients once a training epoch; whether it did so here is not known"
_PAPER: Final = (
    # Ranks that share CPUs: 16 on each of 2 nodes, for DeepCAM 8 on each of 4.
    *_hpdc24(
        "ARCHER2, 2x EPYC 7742 a node", 2, 32,
        {"resnet50": (40.5, 0.989, 40.1), "cosmoflow": (14.9, 0.989, 14.8)},
    ),
    *_hpdc24("ARCHER2, 2x EPYC 7742 a node", 4, 32, {"deepcam": (6.1, 0.987, 6.1)}, notes={"deepcam": _ONE_SYNCHRONISATION}),
    *_hpdc24(
        "ARCHER2, MI210", 1, 4,
        {"resnet50": (293.2, 0.773, 226.6), "cosmoflow": (479.9, 0.151, 72.5), "deepcam": (26.4, 0.55, 14.5)},
        notes={"deepcam": _ONE_SYNCHRONISATION},
    ),
    *_hpdc24(
        "Cirrus, V100", 1, 4,
        {"resnet50": (138.0, 0.973, 134.3), "cosmoflow": (112.2, 0.696, 78.1), "deepcam": (None, None, 15.4)},
        notes={
            "deepcam": "printed as 54.1 samples/s of compute and a fraction of 54.1 %, which contradict the 15.4 of effective"
            f" throughput, so both are left out; {_ONE_SYNCHRONISATION}",
        },
    ),
    *_hpdc24(
        "EIDF, A100", 1, 4,
        {"resnet50": (226.2, 0.794, 179.7), "cosmoflow": (117.9, 0.493, 58.1), "deepcam": (101.7, 0.135, 13.7)},
        notes={"deepcam": _ONE_SYNCHRONISATION},
    ),
    *_hpdc24(
        _GRAPHCORE, None, 8, {"resnet50": (None, None, 255.6), "cosmoflow": (None, None, 14.5)},
        notes={"cosmoflow": "half precision; DeepCAM did not fit"},
    ),
    *_hpdc24(
        "EIDF, Cerebras CS-2", 1, 1, {"resnet50": (None, None, 452.0)},
        notes={"resnet50": "CosmoFlow and DeepCAM did not compile"},
    ),
)  # fmt: skip


def _rates(source: str, workload: str, model: Mapping[str, str], *rows: tuple[str, int | None, float]) -> tuple[Published, ...]:  # fmt: skip
    """Return effective throughputs per device: (system, devices, rate)."""
    return tuple(
        Published(source, system, workload, model, devices, per_device=rate) for system, devices, rate in rows
    )


def _nvidia(device: str, precision: str, one: float, eight: float) -> tuple[Published, ...]:
    return tuple(
        Published(
            "nvidia", f"{device}, {precision}", "resnet50", RESNET50, devices, 1, effective=rate,
            tuning={"precision": precision},
        )
        for devices, rate in ((1, one), (8, eight))
    )  # fmt: skip


def _cscs(system: str, rate: float) -> Published:
    return Published(
        "cscs", system, "resnet50", RESNET50, per_device=rate, data_kind="synthetic",
        tuning={"precision": "fp32"}, note="512 samples a step",
    )  # fmt: skip


PUBLISHED: Final[tuple[Published, ...]] = (
    *_PAPER,
    *_rates("sc21", "cosmoflow", COSMOFLOW_07, ("Cori-GPU, V100", 64, 12.07), ("ABCI, V100", 512, 26.59)),
    *_rates("sc21", "deepcam", DEEPCAM, ("Cori-GPU, V100", 64, 3.56), ("ABCI, V100", 1024, 5.24)),
    *_rates(
        "mlperf-hpc-0.7", "cosmoflow", COSMOFLOW_07,
        ("P100", None, 6.0), ("HAL, V100", 64, 16.6), ("Frontera-RTX", 64, 6.9),
    ),
    *_rates(
        "mlperf-hpc", "cosmoflow", COSMOFLOW,
        ("Longhorn, V100", None, 12.1), ("DGX, A100, v1.0", 128, 67.1), ("JUWELS, A100", 512, 49.9),
        ("Perlmutter, A100, v3.0", 512, 85.8), ("DGX, A100, v2.0", 512, 115.4), ("A100, v2.0", 32, 131.3),
        ("H100", 512, 206.9), ("H100, v3.0", 32, 221.8), ("Fugaku, A64FX node", None, 3.9),
    ),
    *_rates(
        "mlperf-hpc", "deepcam", DEEPCAM,
        ("P100", None, 2.4), ("Longhorn, V100", None, 2.9), ("HAL, V100", None, 3.7), ("Clemson, A100-PCIe", None, 9.5),
        ("Perlmutter, A100", 512, 26.0), ("Dell, A100", None, 22.4), ("A100, v2.0", 16, 40.8), ("H100, v3.0", 16, 81.9),
        ("H100", 2048, 30.6),
    ),
    *_nvidia("V100", "fp32", 367, 2855), *_nvidia("V100", "fp16", 1200, 8322),
    *_nvidia("A100", "tf32", 938, 7248), *_nvidia("A100", "fp16", 2470, 16621),
    _cscs("Alps, GH200", 980), _cscs("Piz Daint, P100", 201),
)  # fmt: skip
