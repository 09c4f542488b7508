"""One rank's whole measurement, in this process."""

import contextlib
import errno
import itertools
import re

import pytest
import torch
from probe_ranks import alone, smoke
from rank_helpers import run_plan

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.worker import loop, main, prepare, rank
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.data.dataset_files import write_error
from pytest_mlhpc.node.worker.distributed import from_environment
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers


@pytest.fixture
def measure(tmp_path):
    return lambda **changes: alone(rank.measure, run_plan(**changes), tmp_path)


@pytest.mark.parametrize("source", ["memory", "device"])
def test_a_measurement_has_all_that_is_asked_of_training(measure, source):
    measurement = combine(run_plan(data_source=source), [measure(data_source=source)])

    assert measurement.data_source == source
    assert {
        "effective_throughput", "compute_throughput", "compute_fraction", "epoch_time", "io_time", "compute_time",
        "wait_time", "copy_time", "first_batch_time", "warmup_time", "step_time", "step_time_p95", "step_time_max",
        "forward_time", "backward_time", "optimizer_time", "peak_memory", "loss", "parameters", "achieved_flops",
        "forward_flop_per_sample", "train_flop_per_sample",
    } <= {metric.name for metric in measurement.metrics}  # fmt: skip
    assert (measurement.metric("read_time") is None) == (source == "device")
    assert measurement.metric("energy") is None


def test_phases_fill_the_window(measure):
    report = measure(parameters={"global_batch": 8, "slow_s": 0.01})

    phases = report.wait_s + report.copy_s + report.forward_s + report.backward_s + report.optimizer_s
    assert report.forward_s >= 12 * 0.01
    assert phases <= sum(report.step_times_s) <= report.epoch_s


def test_warm_up_pays_for_the_first_batch_unless_there_is_none(measure):
    warm, cold = measure(), measure(warmup_steps=0)

    assert warm.first_batch_s == 0.0
    assert warm.loader_start_s > 0.0
    assert cold.loader_start_s >= cold.first_batch_s > 0.0
    assert len(cold.losses) == 12


def test_a_run_that_needs_more_files_than_are_made_within_it_reads_some_again(measure, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MADE_BUDGET", 20 * 32**3 * 4 * 2)
    monkeypatch.setattr(source, "AGAIN_BUDGET", 0)
    parameters = smoke("cosmoflow", global_batch=2, loader_workers=0)

    report = measure(workload="cosmoflow", parameters=parameters, data_source="files")

    assert report.samples == 12 * 2
    assert report.environment["samples_read_again"] == "2"
    assert len(list(tmp_path.rglob("*.tfrecord"))) == 2


@pytest.mark.parametrize(
    ("clock", "step", "text"),
    [("wall", -(10**9), "clock_backwards: the system clock"), ("perf", -1, "clock_backwards")],
)
def test_a_clock_that_goes_back_during_the_run_fails_it(measure, monkeypatch, clock, step, text):
    backwards = itertools.count(10**18, step)
    changed = loop.Clock(**{clock: lambda: next(backwards)})
    recorder = loop.Recorder
    monkeypatch.setattr(loop, "Recorder", lambda: recorder(changed))

    with pytest.raises(WorkerFailure, match=text):
        measure()


@pytest.fixture
def lateness(measure, monkeypatch, tmp_path):
    """Return how to train with a clock that goes on 300 ms each time that it is read; returns step and figures of each progress."""

    def run(**changes):
        slow = itertools.count(10**18, 3 * 10**8)
        recorder = loop.Recorder
        with monkeypatch.context() as patch:
            patch.setattr(loop, "Recorder", lambda: recorder(loop.Clock(*[lambda: next(slow)] * 2)))
            reported = []
            alone(
                rank.measure,
                run_plan(**changes),
                tmp_path,
                lambda step, _steps, _rate, late=None: reported.append((step, late)),
            )
        return reported

    return run


def test_a_rank_is_late_in_warm_up_and_window_by_its_share_of_the_usual_time(lateness):
    reported = lateness(usual_s=1.0, steps=12, warmup_steps=12)
    late = [(step > 0, figures["usual_s"]) for step, figures in reported if figures]
    assert {*late} == {(False, 1.0), (True, 1.0)}
    assert all(figures["elapsed_s"] > 5.0 for _, figures in reported if figures)
    assert any(figures is None for _, figures in reported)


def test_warm_up_that_captures_or_compiles_is_never_late(lateness, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    reported = lateness(usual_s=0.01, parameters={"global_batch": 8, "compile": "default"})
    assert [figures for step, figures in reported if step == 0] == [None] * 4
    assert all(figures for step, figures in reported if step)


def test_without_a_usual_time_no_rank_is_late(lateness):
    assert {figures for _, figures in lateness()} == {None}


def test_equal_seeds_train_equally(measure):
    assert measure().losses == measure().losses


def test_accumulation_counts_steps_and_samples_once(measure):
    report = measure(parameters={"global_batch": 8, "gradient_accumulation": 4})
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
    error, wrapped = OSError(number, "full", "/scratch/set"), RuntimeError("/scratch/set is not written")
    wrapped.__context__ = error
    named = [main.name_failure(one) for one in (error, wrapped, write_error("/scratch/set", error))]
    assert [(outcome, "/scratch/set" in text) for outcome, text in named] == [("disk_full", True)] * 3


def test_the_shell_cannot_put_another_module_in_a_workloads_place(monkeypatch):
    monkeypatch.setenv("MLHPC_WORKLOAD_MODULE", "tiny_workload")
    run = run_plan(workload="language_model", parameters=smoke("language_model"))
    assert prepare.load_task(run).name == "language_model"
    with pytest.raises(WorkerFailure, match="knows no workload 'mine'"):
        prepare.load_task(run_plan(workload="mine", variables={}))


def test_a_precision_that_a_device_does_not_compute_in_is_refused(measure):
    with pytest.raises(WorkerFailure, match=r"wrong_device: .*does not compute in TF32"):
        measure(parameters={"global_batch": 8, "precision": "tf32"})


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
    assert outcome == main.name_failure(MemoryError())[0] == "out_of_memory"
    assert re.search("allocate.*use a smaller batch or smaller arrays", text)
    assert main.name_failure(RuntimeError("shapes differ"))[0] == "worker_exit"
