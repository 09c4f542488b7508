"""benchmarks/training_published.py: what one device is held against, and on which device that is a bound."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks import training, training_published
from benchmarks.report import Row
from pytest_mlhpc.results.schema import RankReport
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.flops import count
from pytest_mlhpc.worker.prepare import load_task

TARGETS = {target.workload: target for target in training_published.TARGETS}
H200 = "NVIDIA H200"


def reported(workload, *, samples, seconds, model=H200, peak=989e12, each=None):
    target = TARGETS[workload]
    run = training_published.plan(target, "cuda")
    report = RankReport(
        rank=0, local_rank=0, host="n", device_type="cuda", device_index=0, device_model=model, steps=1, samples=samples,
        started_ns=0, ended_ns=1, epoch_s=seconds, wait_s=0.0, copy_s=0.0, exposed_copy_s=0.0, warmup_s=0.0,
        step_times_s=(seconds,), losses=(1.0,), peak_flops_per_s=peak, train_flop_per_sample=each,
    )  # fmt: skip
    return training_published.row_of(target, run, report)


def test_targets_are_the_published_rates_of_one_h100_and_shares_of_its_peak():
    rates = {name: target.rate for name, target in TARGETS.items()}
    assert rates == {"cosmoflow": 221.8, "deepcam": 81.9, "resnet50": None, "language_model": None}
    assert {name: target.share for name, target in TARGETS.items() if target.rate is None} == {
        "resnet50": 0.25,
        "language_model": 0.45,
    }


@pytest.mark.parametrize("workload", TARGETS)
def test_each_trains_at_reference_size_as_fast_does_in_bf16_on_a_gpu(workload):
    run = training_published.plan(TARGETS[workload], "cuda")
    assert run.parameters["precision"] == "bf16"
    assert run.parameters["fused_optimizer"] is True
    assert run.parameters["global_batch"] == TARGETS[workload].batch
    pictured = {name: run.parameters.get(name) for name in ("input_size", "height", "image_size", "context")}
    wanted = {"cosmoflow": 128, "deepcam": 768, "resnet50": 224, "language_model": 1024}
    assert wanted[workload] in pictured.values()
    assert count(load_task(run)).train > 0  # the model of these fields can be built (on meta)


def test_a_rate_below_the_published_one_misses_and_one_above_reaches():
    below, above = reported("deepcam", samples=80, seconds=1.0), reported("deepcam", samples=164, seconds=2.0)
    assert (below.measured, below.ok) == ("0.98 (80.0 against 81.9 samples/s)", False)
    assert (above.measured, above.ok) == ("1.00 (82.0 against 81.9 samples/s)", True)
    assert above.what == "deepcam, NVIDIA H200, bf16, batch 4, data in memory: rate over the published one"


def test_a_share_of_the_peak_is_judged_by_the_operations_of_training():
    row = reported("resnet50", samples=10_000, seconds=1.0, each=24.5e9)
    assert (row.measured, row.reach, row.ok) == ("24.8% (10000.0 samples/s)", ">= 25%", False)
    assert reported("resnet50", samples=10_500, seconds=1.0, each=24.5e9).ok is True


@pytest.mark.parametrize(("model", "peak"), [("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H200", None)])
def test_another_device_or_an_unknown_peak_is_not_judged(model, peak):
    row = reported("language_model", samples=100, seconds=1.0, model=model, peak=peak, each=8e11)
    assert row.ok is None
    assert ("peak not known" in row.measured) == (peak is None)


def test_an_older_gpu_is_not_held_to_an_h100s_rate():
    row = reported("cosmoflow", samples=10, seconds=1.0, model="NVIDIA A100-SXM4-80GB", peak=312e12)
    assert row.ok is None


def test_without_a_gpu_every_row_says_that_it_needs_one(monkeypatch):
    monkeypatch.setattr(
        training, "_in_child", lambda _call: {"device": "cpu", "preset": "smoke", "formats": {}}
    )
    rows = training.run()
    assert [row.measured for row in rows] == ["needs a GPU"] * 4
    assert [row.ok for row in rows] == [None] * 4
    assert rows[0].reach == ">= 221.8 samples/s"
    assert rows[-1].reach == ">= 45% of peak"


def test_with_a_gpu_each_row_is_measured_in_a_child(monkeypatch):
    row = Row("what", "reach", "measured", ok=True)
    calls = []

    def child(call):
        calls.append(call)
        if call.startswith("measure"):
            return {"device": "cuda", "preset": "reference", "formats": {}}
        return json.loads(json.dumps(dataclasses.asdict(row)))

    monkeypatch.setattr(training, "_in_child", child)
    monkeypatch.setattr(training, "device_type", lambda: "cuda")
    assert training.run() == [row] * 4
    assert calls[2:] == [f"against_published({at})" for at in range(4)]


@pytest.mark.servers
def test_the_same_code_trains_on_a_cpu_and_judges_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(training_published, "STEPS", 3)
    monkeypatch.setattr(training_published, "WARMUP", 1)
    threads = torch.get_num_threads()
    target = dataclasses.replace(TARGETS["cosmoflow"], batch=2)
    try:
        row = training_published.measure(target, open_device("cpu", 0), tmp_path, preset="smoke")
    finally:
        torch.set_num_threads(threads)
    assert row.ok is None
    assert "fp32, batch 2, data in memory: rate over the published one" in row.what
    assert float(row.measured.split()[0]) > 0
