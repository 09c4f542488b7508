"""Graphcore's IPUs, with a stand-in for poptorch that has its recorded signatures and computes on the CPU: no IPU has seen this."""

from __future__ import annotations

import os
import sys

import poptorch_stand_in
import pytest
import torch
from probe_ranks import free_port
from rank_helpers import HERE, ROOT, Batch, finish, run_plan, start_rank

from pytest_mlhpc.results.combine import combine
from pytest_mlhpc.worker import rank
from pytest_mlhpc.worker.accelerators.base import Accelerator, open_device
from pytest_mlhpc.worker.accelerators.ipu import measure as ipu
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

pytestmark = pytest.mark.servers  # trainings

#: Smoke size, but for what takes longest.
SMALLER = {"deepcam": {"height": 48, "width": 48}, "resnet50": {"image_size": 32}}
SIZES = {"cosmoflow": 8, "deepcam": 8, "resnet50": 8, "language_model": 8}
TRAINED = [pytest.param(name, marks=pytest.mark.feature("ipu", name, "stand-in")) for name in SIZES]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for cores which others use take many times longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poptorch(monkeypatch):
    module = poptorch_stand_in.poptorch()
    monkeypatch.setitem(sys.modules, "poptorch", module)
    return module


def plan_of(name, **changes):
    (workload,) = [one for one in WORKLOADS if one.name == name]
    parameters = parameters_of(
        workload, "smoke", global_batch=SIZES[name], seed=3, **{**SMALLER.get(name, {}), **changes}
    )
    return run_plan(workload=name, parameters=parameters, steps=4, warmup_steps=2, variables={})


def on_cpu(run, folder):
    return rank.measure(run, Group(), open_device("cpu", 0), folder, lambda *_: None)


def on_ipu(run, folder, told=None):
    told = [] if told is None else told
    return ipu.measure(run, Group(), open_device("ipu", 0), folder, lambda *state: told.append(state))


def test_the_stand_in_has_the_recorded_signatures(poptorch):
    assert poptorch_stand_in.signatures(poptorch) == poptorch_stand_in.RECORDED


def test_the_stand_in_refuses_what_poptorch_has_not(poptorch):
    with pytest.raises(TypeError):
        poptorch.Options().deviceIterations(device_iterations=1, more=2)
    with pytest.raises(AttributeError):
        poptorch.Options().deviceIteration(1)


def test_an_ipu_has_all_that_the_protocol_names(poptorch):
    device = open_device("ipu", 2)
    assert {name for name in vars(Accelerator) if not name.startswith("_")} <= set(dir(device))
    assert set(Accelerator.__annotations__) <= set(dir(device))
    assert (device.type, device.index, device.model) == ("ipu", 2, "Graphcore IPU Mk2")
    assert (str(device.device), device.backend, device.asynchronous) == ("cpu", "gloo", False)
    assert device.peak_memory_bytes() is None


def test_its_environment_names_poptorch_and_the_partition(poptorch, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "pod64")
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    assert open_device("ipu", 0).environment() == {"poptorch": "3.3.0", "ipu_partition": "pod64"}


def test_without_poptorch_the_device_is_wrong_and_the_text_says_where_it_comes_from(monkeypatch):
    monkeypatch.setitem(sys.modules, "poptorch", None)
    with pytest.raises(
        WorkerFailure, match="It comes with the Poplar SDK, is in no package registry"
    ) as told:
        open_device("ipu", 0)
    assert told.value.outcome == "wrong_device"


def test_without_an_ipu_the_device_is_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "poptorch", poptorch_stand_in.poptorch(ipus=0))
    with pytest.raises(
        WorkerFailure, match="poptorch finds no IPU; check that the job asked for some"
    ) as told:
        open_device("ipu", 0)
    assert told.value.outcome == "wrong_device"


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_the_cpu_path(poptorch, tmp_path, name):
    run = plan_of(name)
    assert on_ipu(run, tmp_path).losses == pytest.approx(on_cpu(run, tmp_path).losses, rel=1e-5)
    assert poptorch.executors[0].destroyed


@pytest.mark.parametrize("name", ["cosmoflow", "language_model"])
@pytest.mark.parametrize("ipu_execution", [None, "sharded"])
def test_a_model_in_blocks_on_two_ipus_computes_the_same(poptorch, tmp_path, name, ipu_execution):
    dropout = {"dropout": 0.0} if name == "cosmoflow" else {}
    run = plan_of(name, ipus_per_replica=2, gradient_accumulation=2, ipu_execution=ipu_execution, **dropout)
    alone = plan_of(name, gradient_accumulation=2, **dropout)
    assert on_ipu(run, tmp_path).losses == pytest.approx(on_cpu(alone, tmp_path).losses, rel=1e-5)
    strategy = poptorch.executors[0].options.strategy
    kind = poptorch.ShardedExecution if ipu_execution else poptorch.PipelinedExecution
    assert type(strategy) is kind
    assert strategy.stages == (poptorch.AutoStage.AutoIncrement,)


def test_two_replicas_of_half_a_batch_and_two_steps_a_call_train_as_one(poptorch, tmp_path):
    run = plan_of("cosmoflow", ipu_replicas=2, device_iterations=2, dropout=0.0)
    report = on_ipu(run, tmp_path)
    plain = on_cpu(plan_of("cosmoflow", dropout=0.0), tmp_path)
    assert report.losses == pytest.approx(plain.losses, rel=1e-4)
    assert (report.steps, len(report.step_times_s), report.samples) == (4, 4, 32)
    assert report.step_times_s[0] == report.step_times_s[1]
    options = poptorch.executors[0].options
    assert (options.device_iterations, options.replication_factor) == (2, 2)
    assert [shape[0] for shape in poptorch.executors[0].shapes] == [16, 16]


def test_a_measurement_has_all_that_is_asked_of_training(poptorch, tmp_path):
    told = []
    run = plan_of("cosmoflow", ipus_per_replica=2, gradient_accumulation=2)
    report = on_ipu(run, tmp_path, told)
    measurement = combine(run, [report])
    (workload,) = [one for one in WORKLOADS if one.name == "cosmoflow"]
    wanted = {*workload.expected, *workload.expected_of(run.parameters)}
    assert {"compile_time", "ipus"} <= wanted <= {metric.name for metric in measurement.metrics}
    assert measurement.metric("ipus").value == 2
    assert measurement.metric("host_ipu_latency").value == pytest.approx(0.002)
    assert measurement.metric("forward_time") is None
    assert measurement.metric("peak_memory") is None
    assert (measurement.device_type, measurement.device_model) == ("ipu", "Graphcore IPU Mk2")
    assert told[0][:2] == (0, 4)


def test_input_and_output_are_the_share_that_transfers_have_in_a_round_trip(poptorch, tmp_path):
    report = on_ipu(plan_of("language_model"), tmp_path)
    assert report.copy_s == pytest.approx(0.3 * (sum(report.step_times_s) - report.wait_s), rel=0.2)
    assert report.wait_s + report.copy_s < report.epoch_s


def test_the_run_without_input_lets_ipus_make_their_data(poptorch, tmp_path):
    run = plan_of("cosmoflow", device_iterations=2)
    run = run_plan(**{**vars(run), "data_source": "device"})
    report = on_ipu(run, tmp_path)
    assert poptorch.executors[0].options.synthetic
    assert (report.steps, report.read_s) == (4, None)


@pytest.mark.parametrize(
    ("parameters", "outcome", "says"),
    [
        ({"device_iterations": 4}, "worker_exit", "no multiples of device_iterations=4"),
        ({"ipu_replicas": 16}, "worker_exit", "8 samples of a micro-batch do not divide over ipu_replicas=16"),
        ({"ipus_per_replica": 64}, "not_supported", "ipus_per_replica=64: the model has 23 parts"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_fails_with_a_name(poptorch, tmp_path, parameters, outcome, says):
    plan = plan_of("cosmoflow", ipu_execution="sharded", **parameters)
    with pytest.raises(WorkerFailure, match=says) as told:
        on_ipu(plan, tmp_path)
    assert told.value.outcome == outcome


def test_a_loader_that_ends_early_is_named(poptorch, tmp_path):
    batches = iter([(1, 2, 0.0)])
    assert ipu.next_batch(batches, 0) == (1, 2, 0.0)
    with pytest.raises(WorkerFailure, match="the loader ended after 5 steps of this rank") as told:
        ipu.next_batch(batches, 5)
    assert told.value.outcome == "data_exhausted"


@pytest.mark.servers
def test_a_rank_that_is_started_on_ipus_reports_what_it_trained(tmp_path):
    shim = "import sys, poptorch_stand_in\nsys.modules['poptorch'] = poptorch_stand_in.poptorch()\n"
    (tmp_path / "poptorch.py").write_text(shim)
    run = run_plan(**{**vars(plan_of("language_model", device_iterations=2)), "device_type": "ipu"})
    with Batch(str(tmp_path / "s")) as batch:
        path = os.pathsep.join(map(str, (ROOT, HERE, tmp_path)))
        ((code, output),) = finish(start_rank(batch, run, tmp_path, PYTHONPATH=path))
    assert code == 0, output
    (report,) = batch.reports()
    assert (report.device_type, report.device_model, report.steps) == ("ipu", "Graphcore IPU Mk2", 4)
    assert "compile_time" in {figure.name for figure in report.figures}
    assert report.environment["poptorch"] == "3.3.0"


#: Modules of a rank that poprun has started: the stand-ins, which note what each call was given and where programs lie.
INSTANCE = """
import os, sys, zlib, poptorch_stand_in
called = poptorch_stand_in.PoplarExecutor.__call__

def noted(self, *tensors):
    with open(os.environ["SEEN"], "a") as file:
        for sample in tensors[0]:
            file.write(f"{zlib.crc32(str(sample.tolist()).encode())} {self.options.cache}\\n")
    return called(self, *tensors)

poptorch_stand_in.PoplarExecutor.__call__ = noted
sys.modules["poptorch"] = poptorch_stand_in.poptorch()
sys.modules["popdist"], sys.modules["popdist.poptorch"] = poptorch_stand_in.popdist(local_replicas=2)
"""


@pytest.mark.servers
def test_instances_of_poprun_train_on_shares_of_their_own_and_report_their_own_ipus(tmp_path):
    for name in ("poptorch", "popdist"):
        (tmp_path / f"{name}.py").write_text(INSTANCE)
    run = plan_of("language_model", ipu_replicas=2)
    run = run_plan(**{**vars(run), "device_type": "ipu", "ranks": 2, "launcher": "poprun"})
    path, port = os.pathsep.join(map(str, (ROOT, HERE, tmp_path))), str(free_port())
    with Batch(str(tmp_path / "s")) as batch:
        instances = [
            start_rank(
                batch, run, tmp_path, PYTHONPATH=path, SEEN=str(tmp_path / f"seen-{rank}"), MASTER_PORT=port,
                MASTER_ADDR="127.0.0.1", MLHPC_RANKS_FROM="openmpi", OMPI_COMM_WORLD_RANK=rank,
                OMPI_COMM_WORLD_LOCAL_RANK=rank, OMPI_COMM_WORLD_SIZE="2",
            )
            for rank in ("0", "1")
        ]  # fmt: skip
        ended = finish(*instances)
    assert [code for code, _ in ended] == [0, 0], ended
    reports = sorted(batch.reports(), key=lambda one: one.rank)
    assert [(one.rank, one.local_rank, one.steps, one.samples) for one in reports] == [
        (0, 0, 4, 16),
        (1, 1, 4, 16),
    ]
    measurement = combine(run, reports)
    assert (measurement.ranks, measurement.samples, measurement.metric("ipus").value) == (2, 32, 4)
    seen = [[line.split() for line in (tmp_path / f"seen-{rank}").read_text().splitlines()] for rank in "01"]
    shares = [{sample for sample, _ in calls} for calls in seen]
    assert (
        [len(calls) for calls in seen] == [len(share) for share in shares] == [24, 24]
    )  # 6 steps of 4 samples
    assert shares[0].isdisjoint(shares[1])
    assert {cache for calls in seen for _, cache in calls} == {str(tmp_path / "data" / "ipu-run-1")}
