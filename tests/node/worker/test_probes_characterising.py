"""Characterisation by real ranks: kernels, gradients and reading report what they should, and refuse what cannot be."""

import pytest
import torch
from probe_ranks import place_of

from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import gradients, kernels, reading
from pytest_mlhpc.node.worker.workloads.characters import CLASSES
from pytest_mlhpc.session import check_measurement

SMALL = {"input_size": 16, "layers": 3, "base_channels": 4}


@pytest.fixture
def measured(ranks, declare_probe):
    """Measure with real ranks what a test declares, and check it; return the values of its metrics too."""

    def measure(workload, **fields):
        spec, run = declare_probe(workload, fields=SMALL, batch=2, **fields)
        measurement = ranks(run).measurement
        assert check_measurement.check(measurement, spec, run) == []
        return measurement, {metric.name: metric.value for metric in measurement.metrics}

    return measure


@pytest.mark.servers
def test_one_rank_reports_a_step_by_classes_of_kernels(measured):
    measurement, value = measured("kernels", ranks=1)
    shares = {name: value[f"kernel_share_{name}"] for name in CLASSES}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["convolution"] > shares["attention"] == shares["communication"] == 0
    steps, achieved = measurement.metric("step_time").samples, measurement.metric("achieved_flops").samples
    assert [value["step_flop"] / took for took in steps] == [pytest.approx(one) for one in achieved]
    moved = value["step_bytes_modelled"]
    assert sum(value[name] for name in value if name.startswith("bytes_modelled_")) == moved > 0
    assert value["memory_bandwidth_modelled"] == pytest.approx(moved / value["step_time"], rel=1e-6)
    assert measurement.environment["samples_of_a_step"] == "2"
    assert measurement.environment["memory_counter"]


@pytest.mark.servers
def test_two_ranks_exchange_all_gradients_and_report_how_long_they_waited(measured):
    measurement, value = measured("gradients", ranks=2, bucket="4KiB")
    assert value["gradient_messages"] == -(-value["gradient_bytes"] // 4096)
    bandwidth, took = (measurement.metric(f"allreduce_{name}").samples for name in ("bandwidth", "time"))
    done = [per_s * seconds for per_s, seconds in zip(bandwidth, took, strict=True)]
    assert done == [pytest.approx(value["gradient_bytes"])] * measurement.steps
    # Two ranks: the factor of bus bandwidth is 2 (n - 1) / n = 1 (nccl-tests, PERFORMANCE.md).
    assert value["allreduce_bus_bandwidth"] == pytest.approx(value["allreduce_bandwidth"])
    assert value["allreduce_wait_time"] > 0


@pytest.mark.servers
@pytest.mark.parametrize("form", ["tfrecord-gzip", "tfrecord", "hdf5"])
def test_two_ranks_read_each_sample_once(measured, form):
    pytest.importorskip("h5py")
    measurement, value = measured("reading", ranks=2, samples=6, format=form, loader_workers=1)
    assert measurement.cache == "warm"
    assert value["reading_processes"] == 2
    # 16 voxels along each edge, 4 redshifts of two bytes, and 4 targets of four bytes.
    assert value["sample_bandwidth"] / value["sample_rate"] == pytest.approx(16**3 * 4 * 2 + 4 * 4)
    assert value["read_bandwidth"] / value["sample_rate"] == pytest.approx(value["file_bytes"] / 6)
    assert value["read_bandwidth_per_process"] == pytest.approx(value["read_bandwidth"] / 2)
    assert value["read_bandwidth_of_slowest_rank"] > 0


@pytest.mark.parametrize(
    ("module", "parameters", "outcome", "text"),
    [
        (gradients, {}, "too_few_ranks", "gradients are exchanged by two ranks or more"),
        (
            reading,
            {"size": "reference", "samples": 1000},
            "data_unusable",
            r"too many to make within a run: use `mlhpc data make cosmoflow --samples 1000",
        ),
        (reading, {"path": "/nowhere"}, "data_unusable", "/nowhere: is not there"),
        (reading, {"path": "$UNSET/x"}, "data_unusable", r"\$UNSET/x: UNSET is not set .*`variables:`"),
    ],
    ids=["gradients of one rank", "a set too large to make", "a missing set", "a variable that is not set"],
)
def test_what_cannot_be_measured_is_refused(tmp_path, module, parameters, outcome, text):
    workload = module.__name__.rpartition(".")[2]
    with pytest.raises(WorkerFailure, match=text) as refused:
        module.probe(place_of(workload, tmp_path, **parameters))
    assert refused.value.outcome == outcome


def test_lost_samples_fail_the_run(tmp_path):
    probe = reading.probe(place_of("reading", tmp_path, fields=SMALL, samples=4, loader_workers=0))
    try:
        probe.verify()
        probe._samples += 1
        text = r"wrong_result: rank 0 was to read 5 samples of .* and got 4"
        with pytest.raises(WorkerFailure, match=text):
            probe.verify()
    finally:
        probe.close()


@pytest.mark.servers  # the first use of the profiler takes seconds
def test_time_under_the_profiler_belongs_to_the_optimizer_where_it_updates():
    weight = torch.ones(64, 64, requires_grad=True)
    update = torch.optim.SGD([weight], 0.1).step
    found, wall = kernels.kernel_times(
        open_device("cpu", 0), lambda: (weight @ weight).sum().backward(), update
    )
    assert {"matrix", "reduction", "optimizer"} <= set(found)
    assert min(found.values()) >= 0
    assert 0 < sum(found.values()) <= wall * 1.5
