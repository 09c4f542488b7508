"""Communication between real ranks: every operation, its metrics and its checks."""

import re

import pytest
import torch
from probe_ranks import place_of, plan, sabotaged

from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import collective
from pytest_mlhpc.node.worker.workloads.probing import OPERATIONS, collective_metrics, size_name
from pytest_mlhpc.session import check_measurement

KIB = 1024


@pytest.mark.parametrize(
    ("size", "name"),
    [(8, "8b"), (1000, "1000b"), (KIB, "1kib"), (64 * KIB, "64kib"), (3 << 20, "3mib"), (2 << 30, "2gib")],
)
def test_a_size_has_a_name_for_metrics(size, name):
    assert size_name(size) == name


@pytest.mark.parametrize(
    ("operation", "world", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("point_to_point", 16, 1.0),
    ],
)
def test_bus_bandwidth_is_what_nccl_tests_call_so(operation, world, factor):
    assert collective.bus_factor(operation, world) == factor


def test_the_ramp_has_no_gap_where_ranks_parts_meet():
    whole = collective.ramp(20, 0, torch.device("cpu"))
    assert torch.equal(collective.ramp(9, 11, torch.device("cpu")), whole[11:])
    assert whole.tolist()[:9] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_a_size_that_does_not_divide_over_the_ranks_is_rounded_to_one_that_does():
    three, cpu = Group(0, 0, 3), open_device("cpu", 0)
    made = [collective.AllGather(size, three, cpu, "all_gather").bytes for size in (4, 8, 12, 1000)]
    assert made == [12, 12, 12, 996]


def test_one_rank_has_no_peer(tmp_path):
    with pytest.raises(WorkerFailure, match="too_few_ranks: communication needs at least two ranks"):
        collective.probe(place_of("collective", tmp_path))


def values_of(measurement, run):
    """Return all metrics by name; those that an operation promises are there and above zero."""
    values = {metric.name: metric.value for metric in measurement.metrics}
    promised = {"latency", "bus_bandwidth", "algorithm_bandwidth"}
    promised |= set(collective_metrics({**run.parameters, "devices": run.ranks}))
    assert all(values[name] > 0 for name in promised)
    return values


@pytest.mark.servers
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_timed_for_every_size(ranks, declare_probe, operation):
    spec, run = declare_probe("collective", ranks=2, operation=operation, sizes=[8, 64 * KIB], steps=3)
    measurement = ranks(run).measurement
    values, latency = values_of(measurement, run), measurement.metric("latency")
    assert check_measurement.check(measurement, spec, run) == []
    assert values["latency"] == values["time_8b"]
    assert values["bus_bandwidth"] == values["bus_bandwidth_64kib"]
    factor = collective.bus_factor(operation, 2)
    assert values["bus_bandwidth"] == pytest.approx(factor * values["algorithm_bandwidth"])
    assert values["algorithm_bandwidth_64kib"] * values["time_64kib"] == pytest.approx(64 * KIB)
    assert len(measurement.metric("time_8b").samples) == run.steps
    assert (latency.better, latency.tolerance > 0.1) == ("lower", True)
    assert operation in measurement.environment
    assert (measurement.environment["backend"], measurement.cache) == ("gloo", "unknown")
    assert "busy_cores" not in measurement.contention  # a kernel that sends for us is no other program


@pytest.mark.servers
def test_rank_0_talks_to_each_peer(ranks):
    parameters = {"operation": "point_to_point", "peers": "each", "sizes": [8, KIB]}
    run = plan("collective", parameters=parameters, ranks=3)
    measurement = ranks(run).measurement
    values = values_of(measurement, run)
    of_peers = (measurement.metric(f"time_8b_rank{peer}").samples for peer in (1, 2))
    assert measurement.metric("time_8b").samples == tuple(map(max, *of_peers))
    assert values["latency"] == values["time_8b"]
    assert [len(rank.timed) for rank in measurement.per_rank] == [6, 0, 0]


WRONG_ELEMENT = """
import os, torch, torch.distributed as dist
real = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "recv")}

def broken(name):
    def do(*arguments, **named):
        done = real[name](*arguments, **named)
        if arguments[0].numel() > 100 and os.environ.get("RANK") == "1":
            arguments[0].view(-1)[77] += 1
        return done
    return do

for name in real:
    setattr(dist, name, broken(name))
"""


@pytest.mark.servers
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_element_fails_the_run_and_is_named(ranks, operation, tmp_path):
    run = plan("collective", parameters={"operation": operation, "sizes": [8, 4 * KIB]}, ranks=2)
    done = ranks(run, **sabotaged(tmp_path, WRONG_ELEMENT))
    first = done.failures[0]
    where = "elements are wrong on rank 1, the first is number 77: |rank 0"
    assert re.match(f"wrong_result: {operation} of 4kib between 2 ranks: 1 of .*({where})", first)
    assert 1 in {code for code, _ in done.ended}


NOT_SUPPORTED = """
import torch.distributed as dist
def refuse(*_arguments, **_named):
    raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")
dist.reduce_scatter_tensor = dist.reduce_scatter = refuse
"""


@pytest.mark.servers
def test_an_operation_that_this_torch_does_not_have_is_named(ranks, tmp_path):
    run = plan("collective", parameters={"operation": "reduce_scatter"}, ranks=2)
    failures = ranks(run, **sabotaged(tmp_path, NOT_SUPPORTED)).failures
    text = f"not_supported: reduce_scatter is not in torch {torch.__version__} with gloo"
    assert [failure.startswith(text) for failure in failures] == [True, True]
