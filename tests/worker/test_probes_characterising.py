"""Characterisation by real ranks: kernels, gradients and reading report what they should, and refuse what cannot be."""

from __future__ import annotations

import pytest
from probe_ranks import plan

from pytest_mlhpc.results import validate
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import gradients, profiled, reading
from pytest_mlhpc.worker.probes.base import Place
from pytest_mlhpc.worker.workloads.characterising import CLASSES

SMALL = {"input_size": 16, "layers": 3, "base_channels": 4}


def place(workload, tmp_path, **parameters) -> Place:
    return Place(plan(workload, parameters=parameters), Group(), open_device("cpu", 0), tmp_path)


@pytest.mark.servers
def test_one_rank_reports_a_step_by_classes_of_kernels(ranks, declare_probe):
    spec, run = declare_probe("kernels", ranks=1, fields=SMALL, batch=2)
    measurement = ranks(run).measurement
    assert validate.check(measurement, spec, run) == []
    shares = {name: measurement.metric(f"kernel_share_{name}").value for name in CLASSES}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["convolution"] > 0
    assert shares["attention"] == shares["communication"] == 0
    step, flop = measurement.metric("step_time"), measurement.metric("step_flop")
    achieved = measurement.metric("achieved_flops")
    assert [flop.value / took for took in step.samples] == [pytest.approx(one) for one in achieved.samples]
    moved = measurement.metric("step_bytes_modelled").value
    by_class = [one.value for one in measurement.metrics if one.name.startswith("bytes_modelled_")]
    assert sum(by_class) == moved > 0
    assert measurement.metric("memory_bandwidth_modelled").value == pytest.approx(
        moved / step.value, rel=1e-6
    )
    assert measurement.environment["samples_of_a_step"] == "2"
    assert measurement.environment["memory_counter"]


@pytest.mark.servers
def test_two_ranks_exchange_all_gradients_and_say_how_long_they_waited(ranks, declare_probe):
    spec, run = declare_probe("gradients", ranks=2, fields=SMALL, batch=2, bucket="4KiB")
    measurement = ranks(run).measurement
    assert validate.check(measurement, spec, run) == []
    size, messages = measurement.metric("gradient_bytes"), measurement.metric("gradient_messages")
    assert messages.value == -(-size.value // 4096)
    bandwidth, took = measurement.metric("allreduce_bandwidth"), measurement.metric("allreduce_time")
    done = [per_s * seconds for per_s, seconds in zip(bandwidth.samples, took.samples, strict=True)]
    assert done == [pytest.approx(size.value)] * run.steps
    # Two ranks: the factor of bus bandwidth is 2 (n - 1) / n = 1 (nccl-tests, PERFORMANCE.md).
    assert measurement.metric("allreduce_bus_bandwidth").value == pytest.approx(bandwidth.value)
    assert measurement.metric("allreduce_wait_time").value > 0


@pytest.mark.servers
@pytest.mark.parametrize("form", ["tfrecord-gzip", "tfrecord", "hdf5"])
def test_two_ranks_read_each_sample_once(ranks, declare_probe, form):
    pytest.importorskip("h5py")
    fields = {"samples": 6, "batch": 2, "format": form, "loader_workers": 1, "fields": SMALL}
    spec, run = declare_probe("reading", ranks=2, **fields)
    measurement = ranks(run).measurement
    assert validate.check(measurement, spec, run) == []
    assert measurement.cache == "warm"
    assert measurement.metric("reading_processes").value == 2
    rate, unpacked = measurement.metric("sample_rate"), measurement.metric("sample_bandwidth")
    # 16 voxels along each edge, 4 redshifts of two bytes, and 4 targets of four bytes.
    assert unpacked.value / rate.value == pytest.approx(16**3 * 4 * 2 + 4 * 4)
    read, files = measurement.metric("read_bandwidth"), measurement.metric("file_bytes")
    assert read.value / rate.value == pytest.approx(files.value / 6)
    assert measurement.metric("read_bandwidth_per_process").value == pytest.approx(read.value / 2)
    assert measurement.metric("read_bandwidth_of_slowest_rank").value > 0


def test_gradients_of_one_rank_are_refused(tmp_path):
    with pytest.raises(WorkerFailure, match="too_few_ranks: gradients are exchanged by two ranks or more"):
        gradients.probe(place("gradients", tmp_path))


def test_a_set_too_large_to_be_made_within_a_run_is_refused_with_the_command_that_makes_it(tmp_path):
    asked = place("reading", tmp_path, size="reference", samples=1000)
    with pytest.raises(
        WorkerFailure, match=r"too many to make within a run: use `mlhpc data make cosmoflow --samples 1000"
    ):
        reading.probe(asked)


def test_a_missing_set_is_refused(tmp_path):
    with pytest.raises(WorkerFailure, match=r"nowhere: is not there") as refused:
        reading.probe(place("reading", tmp_path, path=str(tmp_path / "nowhere")))
    assert refused.value.outcome == "data_unusable"


def test_a_set_whose_variable_is_not_set_is_refused_with_its_name(tmp_path):
    with pytest.raises(
        WorkerFailure, match=r"\$NOT_SET_HERE/x: NOT_SET_HERE is not set .*`variables:`"
    ) as refused:
        reading.probe(place("reading", tmp_path, path="$NOT_SET_HERE/x"))
    assert refused.value.outcome == "data_unusable"


def test_samples_that_get_lost_fail_the_run(tmp_path):
    probe = reading.probe(place("reading", tmp_path, fields=SMALL, samples=4, loader_workers=0))
    try:
        probe.verify()
        probe._samples += 1
        with pytest.raises(
            WorkerFailure, match=r"wrong_result: rank 0 was to read 5 samples of .* and got 4"
        ):
            probe.verify()
    finally:
        probe.close()


def test_time_under_the_profiler_belongs_to_the_optimizer_where_it_updates():
    import torch

    weight = torch.ones(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    found, wall = profiled.times(
        open_device("cpu", 0), lambda: (weight @ weight).sum().backward(), optimizer.step
    )
    assert {"matrix", "reduction", "optimizer"} <= set(found)
    assert all(seconds >= 0 for seconds in found.values())
    assert 0 < sum(found.values()) <= wall * 1.5
