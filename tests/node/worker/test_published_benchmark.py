"""benchmarks/training_published.py: what one device is held against, and on which device that is a bound."""

import dataclasses
import re

import pytest

from benchmarks import training, training_published
from benchmarks.report import Row
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.prepare import load_task
from pytest_mlhpc.node.worker.reporting import count

TARGETS = {target.workload: target for target in training_published.TARGETS}


def row(workload, samples, seconds=1.0, *, model="NVIDIA H200", peak=989e12, each=None):
    """Return the row of a run that took so long for its samples, of so many operations each."""
    run = training_published.plan(TARGETS[workload], "cuda")
    report = RankReport(
        rank=0, local_rank=0, host="n", device_type="cuda", device_index=0, device_model=model, steps=1, samples=samples,
        started_ns=0, ended_ns=1, epoch_s=seconds, wait_s=0.0, copy_s=0.0, exposed_copy_s=0.0, warmup_s=0.0,
        step_times_s=(seconds,), losses=(1.0,), peak_flops_per_s=peak, train_flop_per_sample=each,
    )  # fmt: skip
    return training_published.row_of(TARGETS[workload], run, report)


def test_targets_are_the_published_rates_of_one_h100_and_shares_of_its_peak():
    targets = {name: target.rate or f"{target.share:.0%}" for name, target in TARGETS.items()}
    assert targets == {"cosmoflow": 221.8, "deepcam": 81.9, "resnet50": "25%", "language_model": "45%"}


@pytest.mark.parametrize(
    ("workload", "field", "size"),
    [
        ("cosmoflow", "input_size", 128),
        ("deepcam", "height", 768),
        ("resnet50", "image_size", 224),
        ("language_model", "context", 1024),
    ],
)
def test_each_trains_at_reference_size_as_fast_does_in_bf16_on_a_gpu(workload, field, size):
    run = training_published.plan(TARGETS[workload], "cuda")
    fields = {
        "precision": "bf16",
        "fused_optimizer": True,
        "global_batch": TARGETS[workload].batch,
        field: size,
    }
    assert {name: run.parameters[name] for name in fields} == fields
    assert count(load_task(run)).train > 0  # the model of these fields can be built (on meta)


A100 = {"model": "NVIDIA A100-SXM4-80GB", "peak": 312e12}


@pytest.mark.parametrize(
    ("found", "measured", "ok"),
    [
        (row("deepcam", 80), "0.98 (80.0 against 81.9 samples/s)", False),
        (row("deepcam", 164, 2.0), "1.00 (82.0 against 81.9 samples/s)", True),
        (row("resnet50", 10_000, each=24.5e9), "24.8% (10000.0 samples/s)", False),
        (row("resnet50", 10_500, each=24.5e9), "26.0% (10500.0 samples/s)", True),
        (row("language_model", 100, each=8e11, **A100), "25.6% (100.0 samples/s)", None),
        (row("language_model", 100, each=8e11, peak=None), "peak not known", None),
        (row("cosmoflow", 10, **A100), "0.05 (10.0 against 221.8 samples/s)", None),
    ],
    ids=[
        "a rate below the published one", "a rate above it", "a share below that of the peak", "a share above it",
        "a share of an older GPU", "an unknown peak", "a rate of an older GPU",
    ],
)  # fmt: skip
def test_a_row_is_judged_on_the_device_of_its_target_alone(found, measured, ok):
    assert measured in found.measured
    assert found.ok is ok


def test_a_row_names_what_was_measured_and_what_is_to_be_reached():
    expected = "deepcam, NVIDIA H200, bf16, batch 4, data in memory: rate over the published one"
    assert row("deepcam", 80).what == expected
    assert row("resnet50", 10_000, each=24.5e9).reach == ">= 25%"


def test_without_a_gpu_every_row_says_that_it_needs_one(monkeypatch):
    on_cpu = {"device": "cpu", "preset": "smoke", "formats": {}}
    monkeypatch.setattr(training, "_in_child", lambda _call: on_cpu)
    rows = training.run()
    assert [(found.measured, found.ok) for found in rows] == [("needs a GPU", None)] * 4
    assert (rows[0].reach, rows[-1].reach) == (">= 221.8 samples/s", ">= 45% of peak")


def test_with_a_gpu_each_row_is_measured_in_a_child(monkeypatch):
    expected, calls = Row("what", "reach", "measured", ok=True), []

    def child(call):
        calls.append(call)
        if call.startswith("measure"):
            return {"device": "cuda", "preset": "reference", "formats": {}}
        return dataclasses.asdict(expected)

    monkeypatch.setattr(training, "_in_child", child)
    monkeypatch.setattr(training, "device_type", lambda: "cuda")
    assert training.run() == [expected] * 4
    assert calls[2:] == [f"against_published({at})" for at in range(4)]


@pytest.mark.servers
def test_the_same_code_trains_on_a_cpu_and_judges_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(training_published, "STEPS", 3)
    monkeypatch.setattr(training_published, "WARMUP", 1)
    target = dataclasses.replace(TARGETS["cosmoflow"], batch=2)
    found = training_published.measure(target, open_device("cpu", 0), tmp_path, preset="smoke")
    assert found.ok is None
    assert "fp32, batch 2, data in memory: rate over the published one" in found.what
    assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d against 221\.8 samples/s\)", found.measured)
