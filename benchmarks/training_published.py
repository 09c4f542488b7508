"""One device in bf16 against published figures of one H100: CosmoFlow and DeepCAM by rate, the others by share of its peak.

The rates are those of MLPerf HPC v3.0 that ``papers/throughput.py`` has, per H100: submissions of 32 and 16 devices, whose
share of communication and reading is in them. ResNet-50 and the language model have no such figure, so that a bound on the
share of the device's dense peak (model FLOPs utilization) stands for one.

Each workload trains at reference size as a test with ``tuning="fast"`` does. Where a rate is asked, samples come from memory
and cross to the device; where the share of its peak is asked, they lie on it. Only a Hopper GPU whose peak is known is bound:
another device's figures are printed, and on a CPU nothing is measured, as a small model's rate says nothing of these.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.worker import rank
from pytest_mlhpc.node.worker.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.characters import training_of
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import tuned
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.papers.throughput import PUBLISHED

#: Steps of warm-up hold compilation and cuDNN's search for kernels.
STEPS, WARMUP = 60, 20
#: GPUs that published figures of an H100 are a fair measure for.
HOPPER = re.compile(r"\bH200\b|\bH100\b|\bGH200\b")


@dataclass(frozen=True)
class Target:
    """What one workload should reach. ``batch``: samples of one step, which fit into 80 GB.

    ``rate`` is in samples/s; None: ``share`` of the device's peak is asked instead.
    """

    workload: str
    batch: int
    rate: float | None = None
    share: float = 0.0

    @property
    def source(self) -> str:
        """Where samples come from."""
        return "device" if self.rate is None else "memory"


def h100(workload: str) -> float:
    """Return the published samples/s of one H100 in MLPerf HPC v3.0."""
    [found] = [
        one.per_device
        for one in PUBLISHED
        if one.workload == workload and one.system == "H100, v3.0" and one.per_device is not None
    ]
    return found


TARGETS = (
    Target("cosmoflow", batch=8, rate=h100("cosmoflow")),
    Target("deepcam", batch=4, rate=h100("deepcam")),
    Target("resnet50", batch=256, share=0.25),
    Target("language_model", batch=16, share=0.45),
)


def plan(target: Target, device_type: str, preset: str = "reference") -> RunPlan:
    """Return the run of one workload on one device, as ``tuning="fast"`` leaves its fields."""
    asked = {"tuning": "fast", "global_batch": target.batch}
    values = parameters_of(training_of(target.workload), preset, **asked)
    return RunPlan(
        run_id=target.workload, nonce="", attempt=0, workload=target.workload,
        parameters=tuned(values, asked, device_type, target.workload), nodes=1, ranks=1,
        cores_per_rank=len(os.sched_getaffinity(0)), device_type=device_type, launcher="plain", time_limit_s=900.0,
        steps=STEPS, warmup_steps=WARMUP, data_source=target.source,
    )  # fmt: skip


def measure(target: Target, accelerator: Accelerator, folder: Path, preset: str = "reference") -> Row:
    """Train one workload on *accelerator* and return its row."""
    run = plan(target, accelerator.type, preset)
    report = rank.measure(run, Group(), accelerator, folder, lambda *_: None)
    return row_of(target, run, report)


def row_of(target: Target, run: RunPlan, report: RankReport) -> Row:
    """Judge what was measured; a device that the bound is not for, or whose peak is not known, is not judged."""
    rate = report.samples / report.epoch_s
    precision = run.parameters["precision"]
    what = f"{target.workload}, {report.device_model}, {precision}, batch {target.batch}, data in {target.source}"
    bound = HOPPER.search(report.device_model) is not None and precision == "bf16"
    if target.rate is not None:
        reached, reach = rate / target.rate, ">= 1.0 of an H100"
        text = f"{reached:.2f} ({rate:.1f} against {target.rate:.1f} samples/s)"
        return Row(f"{what}: rate over the published one", reach, text, reached >= 1.0 if bound else None)
    what, reach = f"{what}: share of peak", f">= {target.share:.0%}"
    if report.peak_flops_per_s is None or report.train_flop_per_sample is None:
        return Row(what, reach, f"peak not known ({rate:.1f} samples/s)", None)
    share = report.train_flop_per_sample * rate / report.peak_flops_per_s
    return Row(what, reach, f"{share:.1%} ({rate:.1f} samples/s)", share >= target.share if bound else None)


def unmeasured() -> list[Row]:
    """Return the rows of a machine without a GPU."""
    return [
        Row(
            f"{target.workload}, one device, bf16, against published figures of an H100",
            f">= {target.share:.0%} of peak" if target.rate is None else f">= {target.rate:.1f} samples/s",
            "needs a GPU",
            None,
        )
        for target in TARGETS
    ]
