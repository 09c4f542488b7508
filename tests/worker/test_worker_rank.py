"""One rank's whole measurement, in this process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os

import pytest
import torch
from rank_helpers import run_plan

from pytest_mlhpc.results.combine import combine
from pytest_mlhpc.worker import main, prepare, rank, timing
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.data import source
from pytest_mlhpc.worker.data.errors import write_error
from pytest_mlhpc.worker.distributed import Group, from_environment
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

pytestmark = pytest.mark.servers


def measure(tmp_path, run, told=None):
    told = [] if told is None else told
    return rank.measure(run, Group(), open_device("cpu", 0), tmp_path, lambda *state: told.append(state))


@pytest.mark.parametrize("source", ["memory", "device"])
def test_a_measurement_has_all_that_is_asked_of_training(tmp_path, source):
    run = run_plan(data_source=source)

    measurement = combine(run, [measure(tmp_path, run)])

    assert measurement.data_source == source
    assert {
        "effective_throughput", "compute_throughput", "compute_fraction", "epoch_time", "io_time", "compute_time",
        "wait_time", "copy_time", "first_batch_time", "warmup_time", "step_time", "step_time_p95", "step_time_max",
        "forward_time", "backward_time", "optimizer_time", "peak_memory", "loss", "parameters", "achieved_flops",
        "forward_flop_per_sample", "train_flop_per_sample",
    } <= {metric.name for metric in measurement.metrics}  # fmt: skip
    assert (measurement.metric("read_time") is None) == (source == "device")
    assert measurement.metric("energy") is None


def test_phases_fill_the_window(tmp_path):
    report = measure(tmp_path, run_plan(parameters={"global_batch": 8, "slow_s": 0.01}))

    parts = report.wait_s + report.copy_s + report.forward_s + report.backward_s + report.optimizer_s
    assert report.forward_s >= 12 * 0.01
    assert parts <= sum(report.step_times_s) <= report.epoch_s


def test_warm_up_pays_for_the_first_batch_unless_there_is_none(tmp_path):
    warm, cold = measure(tmp_path, run_plan()), measure(tmp_path, run_plan(warmup_steps=0))

    assert warm.first_batch_s == 0.0
    assert cold.first_batch_s > 0.0
    assert cold.loader_start_s >= cold.first_batch_s
    assert warm.loader_start_s > 0.0
    assert len(cold.losses) == 12


def test_a_run_that_needs_more_files_than_are_made_within_it_reads_some_again(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MADE_BUDGET", 20 * 32**3 * 4 * 2)
    monkeypatch.setattr(source, "AGAIN_BUDGET", 0)
    workload = next(workload for workload in WORKLOADS if workload.name == "cosmoflow")
    parameters = parameters_of(workload, "smoke", global_batch=4, loader_workers=0)

    report = measure(tmp_path, run_plan(workload="cosmoflow", parameters=parameters, data_source="files"))

    assert report.samples == 12 * 4
    assert report.environment["samples_read_again"] == "4"
    assert len(list(tmp_path.rglob("*.tfrecord"))) == 4


def test_a_system_clock_set_back_during_the_run_fails_it(tmp_path, monkeypatch):
    backwards = itertools.count(10**18, -(10**9))
    clock = timing.Clock(wall=lambda: next(backwards))
    whole = timing.Recorder
    monkeypatch.setattr(timing, "Recorder", lambda: whole(clock))

    with pytest.raises(WorkerFailure, match="clock_backwards: the system clock"):
        measure(tmp_path, run_plan())


def test_a_clock_for_durations_going_back_fails_the_run(tmp_path, monkeypatch):
    backwards = itertools.count(10**18, -1)
    clock = timing.Clock(perf=lambda: next(backwards))
    whole = timing.Recorder
    monkeypatch.setattr(timing, "Recorder", lambda: whole(clock))

    with pytest.raises(WorkerFailure, match="clock_backwards"):
        measure(tmp_path, run_plan())


def test_equal_seeds_train_equally(tmp_path):
    assert measure(tmp_path, run_plan()).losses == measure(tmp_path, run_plan()).losses


def test_accumulation_counts_steps_and_samples_once(tmp_path):
    run = run_plan(parameters={"global_batch": 8, "gradient_accumulation": 4})

    report = measure(tmp_path, run)

    assert (report.steps, report.samples) == (12, 96)


def test_an_unset_global_batch_is_the_workload_s_batch_for_each_rank():
    run = run_plan(workload="deepcam", parameters={"global_batch": None})

    assert prepare.split_batch(run, 4) == prepare.Batches(micro=2, accumulate=1, step_samples=8)


@pytest.mark.parametrize(
    "variables", [{"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "0", "LOCAL_RANK": "-1"}]
)
def test_launcher_variables_that_make_no_sense_are_named(variables):
    with pytest.raises(WorkerFailure, match="RANK"):
        from_environment(variables)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_the_machine_s_fault_and_names_the_path(number):
    error = OSError(number, os.strerror(number), "/scratch/set")
    try:
        try:
            raise error
        except OSError as caught:
            raise write_error("/scratch/set", caught) from None
    except Exception as wrapped:  # noqa: BLE001 - as the worker does
        outcome, text = main.name_failure(wrapped)

    assert outcome == "disk_full"
    assert "/scratch/set" in text
    assert main.name_failure(error)[0] == "disk_full"


def test_the_shell_cannot_put_another_module_in_a_workloads_place(monkeypatch):
    monkeypatch.setenv("MLHPC_WORKLOAD_MODULE", "tiny_workload")
    workload = next(one for one in WORKLOADS if one.name == "language_model")
    run = run_plan(workload=workload.name, parameters=parameters_of(workload, "smoke"))
    assert prepare.load_task(run).name == "language_model"
    with pytest.raises(WorkerFailure, match="knows no workload 'mine'"):
        prepare.load_task(run_plan(workload="mine", variables={}))


def test_a_precision_that_a_device_does_not_compute_in_is_refused(tmp_path):
    run = run_plan(parameters={"global_batch": 8, "precision": "tf32"})
    with pytest.raises(WorkerFailure, match="does not compute in TF32") as caught:
        measure(tmp_path, run)
    assert caught.value.outcome == "wrong_device"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_that_only_warns_and_computes_in_fp32_is_refused(monkeypatch, precision):
    monkeypatch.setattr(prepare, "autocast", lambda *_: contextlib.nullcontext())
    with pytest.raises(WorkerFailure, match=f"precision={precision}: torch .* does not compute in it"):
        prepare.require_precision(precision, open_device("cpu", 0))
    monkeypatch.undo()
    prepare.require_precision(precision, open_device("cpu", 0))


def test_arrays_that_no_machine_can_hold_are_called_lack_of_memory():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**58)
    outcome, text = main.name_failure(refused.value)
    assert outcome == "out_of_memory"
    assert "allocate" in text
    assert "use a smaller batch or smaller arrays" in text
    assert main.name_failure(MemoryError())[0] == "out_of_memory"
    assert main.name_failure(RuntimeError("shapes differ"))[0] == "worker_exit"
